# Sourced by the scripts beside it: makes .venv with this package and the extras named as arguments, once; sets $python.
# HF_FSDP_AMP_PYTHON names the interpreter to make it with, if not python3.
venv=.venv
python="$venv/bin/python"
extras="$(IFS=,; echo "$*")"
stamp="$venv/installed-$extras"
if [ ! -e "$stamp" ] || [ setup.cfg -nt "$stamp" ]; then
    echo "== Installing into $venv (a few minutes the first time: torch is large)"
    [ -x "$python" ] || "${HF_FSDP_AMP_PYTHON:-python3}" -m venv "$venv"
    "$python" -m pip install --quiet --disable-pip-version-check --editable ".[$extras]"
    touch "$stamp"
fi
