#!/usr/bin/env bash
# Set everything up and run all checks: ruff, mypy and the tests. Arguments go to pytest.
#
#   bash scripts/run_tests.sh [-k expression ...]
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup_venv.sh report test
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1

"$python" -m ruff check .
"$python" -m ruff format --check .
"$python" -m mypy
"$python" -m pytest "$@"
