#!/usr/bin/env bash
# Sets up .venv, as the Makefile asks:  scripts/setup.sh run | dev
#
#   run   torch and Kenpo: what `kenpo train` needs
#   dev   the same, and what the tests and the linters need
#
# Done once: .venv/.kenpo-LEVEL holds what was installed, and the next call returns at once until pyproject.toml,
# constraints.txt or the place of the checkout changes. While it works .cache/setup/unfinished exists; a call that finds
# it builds .venv anew, because an interrupted pip may leave half a package (its downloads are kept).
# PYTHON=... chooses the interpreter.
set -euo pipefail
cd "$(dirname "$0")/.."
level=${1:?usage: scripts/setup.sh run|dev}
case $level in
  run) extras="" ;;
  dev) extras="[dev,tasks,loggers,lora]" ;;
  *) echo "setup: unknown level '$level': use run or dev" >&2; exit 2 ;;
esac
venv=.venv
state=.cache/setup
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 PIP_USER=0 PIP_ROOT_USER_ACTION=ignore
unset PYTHONHOME PYTHONPATH

fail() { echo "setup: $*" >&2; exit 2; }
recent_enough() { [ "$("$1" -c 'import sys; print(sys.version_info >= (3, 11))' 2>/dev/null)" = True ]; }
minor() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])'; }

if [ -n "${PYTHON:-}" ]; then
  command -v "$PYTHON" >/dev/null || fail "PYTHON=$PYTHON is not a program that can be run"
  recent_enough "$PYTHON" || fail "PYTHON=$PYTHON is not Python 3.11 or newer, which Kenpo needs"
fi

create() { # a fresh .venv, whatever stood there
  local python="" name
  for name in ${PYTHON:+"$PYTHON"} python3 python3.14 python3.13 python3.12 python3.11; do
    if command -v "$name" >/dev/null && recent_enough "$name"; then python=$name; break; fi
  done
  [ -n "$python" ] || fail "no Python 3.11 or newer found: install one (Debian, Ubuntu: apt install python3 python3-venv), or name it: make PYTHON=/path/to/python3"
  "$python" -c 'import venv, ensurepip' 2>/dev/null ||
    fail "Python $(minor "$python") has no venv module: install it (Debian, Ubuntu: apt install python$(minor "$python")-venv), then call make again"
  echo "setup: creating $venv with Python $(minor "$python")"
  touch "$state/unfinished"
  "$python" -m venv --clear "$venv"
}

usable() { # .venv has the Python that is wanted, and a pip that starts
  recent_enough "$venv/bin/python" || return 1
  [ -z "${PYTHON:-}" ] || [ "$(minor "$PYTHON")" = "$(minor "$venv/bin/python")" ] || return 1
}

wanted() { # one line that changes whenever the set-up has to be done again
  echo "$1 $(cat pyproject.toml constraints.txt scripts/setup.sh | cksum | tr ' ' -) $(minor "$venv/bin/python") $PWD"
}

installed() { [ "$(cat "$venv/.kenpo-$level" 2>/dev/null)" = "$(wanted "$level")" ]; }

# Two calls at once (make train and make test) take turns. Where flock is missing, don't make them.
mkdir -p "$state"
if command -v flock >/dev/null; then
  exec 9>"$state/lock"
  flock -n 9 || { echo "setup: waiting for another set-up of this checkout to finish"; flock 9; }
fi

if [ -e "$state/unfinished" ]; then
  echo "setup: the last set-up did not finish; starting again"
  create
elif ! usable; then
  create
elif installed; then
  exit 0
fi
touch "$state/unfinished"
"$venv/bin/python" -m pip --version >/dev/null 2>&1 || create
rm -f "$venv"/.kenpo-*
pip() { "$venv/bin/python" -m pip install --quiet --progress-bar off -c constraints.txt "$@"; }
echo "setup: installing torch (minutes on the first call)"
pip torch
echo "setup: installing Kenpo${extras:+ with $extras}"
pip -e ".$extras"
"$venv/bin/python" -c 'import torch, transformers, kenpo' || fail "the installed packages can't be imported; call make again"
wanted run > "$venv/.kenpo-run"
[ "$level" = run ] || wanted dev > "$venv/.kenpo-dev"
rm "$state/unfinished"
echo "setup: done"
