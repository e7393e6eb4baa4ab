#!/usr/bin/env bash
# Makes .venv from uv.lock on a machine that has only Python, and says in one sentence what is missing otherwise.
# Prints the path of uv on its last line; everything else goes to stderr.
set -euo pipefail
cd "$(dirname "$0")/.."

UV_VERSION=0.13.9
CACHE=${DCP_DISAGG_CACHE:-$HOME/.cache/dcp-disagg}

fail() { echo "bootstrap: $1" >&2; exit 2; }

[ "$(uname -s)" = Linux ] || fail "this is $(uname -s); the local cluster needs Linux."
python=$(command -v python3) || fail "python3 is not installed; install Python 3.11 or newer (Debian: apt-get install python3)."
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
  fail "$("$python" --version) is too old; Python 3.11 or newer is needed."
free_mib=$(df -Pm "$PWD" | awk 'NR==2 {print $4}')
[ "$free_mib" -ge 500 ] || fail "only $free_mib MiB are free on the disk of $PWD; the Python environment needs 500."

uv=$(command -v uv || true)
if [ -z "$uv" ] || [ "$("$uv" --version | cut -d' ' -f2)" != "$UV_VERSION" ]; then
  uv=$CACHE/tools/uv-$UV_VERSION/bin/uv
  if [ ! -x "$uv" ]; then
    echo "bootstrap: installing uv $UV_VERSION" >&2
    if ! "$python" -m pip --version >/dev/null 2>&1; then
      [ "$(id -u)" = 0 ] || fail "pip is not installed; run: apt-get install python3-pip"
      { apt-get update -q && apt-get install -yq --no-install-recommends python3-pip; } >&2 ||
        fail "pip is missing and apt-get could not install python3-pip; its words are above."
    fi
    "$python" -m pip install -q --target "$CACHE/tools/uv-$UV_VERSION" "uv==$UV_VERSION" >&2 ||
      fail "pip could not install uv $UV_VERSION from the package index; its words are above."
  fi
fi

"$uv" sync -q --frozen --extra operator >&2 || fail "uv could not install the locked Python environment; its words are above."
echo "$uv"
