#!/usr/bin/env bash
# Runs the tests of Kenpo's plug-ins inside the trainers they belong to:  scripts/hosts.sh [trl] [verl] [-- pytest options]
#
# Each host gets an environment of its own, .peers/HOST, made once: a host pins what it needs, and none of it may reach
# .venv. PYTHON=... chooses the interpreter.
set -euo pipefail
cd "$(dirname "$0")/.."
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 PIP_USER=0 OMP_NUM_THREADS=1 TRANSFORMERS_VERBOSITY=error
unset PYTHONHOME
declare -A PACKAGES=(
  [trl]="torch==2.13.0 trl==1.16.* transformers==5.24.* peft>=0.17,<1"
  [verl]="torch==2.13.0 verl==0.9.* peft>=0.17,<1 uvicorn fastapi TransferQueue==0.1.11 cachetools"
)
# Files to compare with whose own dependencies are not wanted; where there is none for this machine, their tests are skipped.
declare -A BARE=([verl]="openrlhf==0.11.*")
hosts=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do hosts+=("$1"); shift; done
[ $# -eq 0 ] || shift
[ ${#hosts[@]} -gt 0 ] || hosts=(trl verl)

for host in "${hosts[@]}"; do
  [ -n "${PACKAGES[$host]:-}" ] || { echo "hosts: unknown host '$host': trl or verl" >&2; exit 2; }
  venv=.peers/$host-plugin
  wanted="${PACKAGES[$host]}"
  if [ "$(cat "$venv/.holds" 2>/dev/null)" != "$wanted" ]; then
    echo "hosts: installing $host (minutes)"
    rm -rf "$venv"
    mkdir -p .peers
    "${PYTHON:-python3}" -m venv "$venv"
    # shellcheck disable=SC2086
    "$venv/bin/python" -m pip install --quiet --progress-bar off $wanted "pytest>=8.4,<10" "pytest-timeout>=2.3,<3" "tyro>=1,<2" "matplotlib>=3.9,<4"
    if [ -n "${BARE[$host]:-}" ]; then
      # shellcheck disable=SC2086
      "$venv/bin/python" -m pip install --quiet --progress-bar off --no-deps ${BARE[$host]} || echo "hosts: without ${BARE[$host]}"
    fi
    echo "$wanted" > "$venv/.holds"
  fi
  echo "hosts: $host"
  PYTHONPATH="$PWD/src:$PWD" "$venv/bin/python" -m pytest -m hosts --timeout 900 tests/hosts/test_"$host"*.py "$@"
done
