#!/bin/sh
# Installs Corral @VERSION@ on this machine, then joins it to the fleet that serves this file. It holds no secret: the
# join token comes on standard input.
#
#   printf %s TOKEN | sh install.sh URL [options of `corral join`]
#
# CORRAL_DATA=FOLDER before the command chooses the data folder, CORRAL_BIN=FOLDER where the command `corral` appears.
#
# The command that `corral token create` prints checks the SHA-256 of this file before it runs it; this file checks the
# wheel of Corral, and the list inside that wheel has the hash of every other package.
set -eu

VERSION='@VERSION@'
WHEEL='@WHEEL@'
SHA256='@SHA256@'
CA='@CA@'

say() { printf 'corral: %s\n' "$*" >&2; }
fail() { say "$*"; exit 1; }

main() {
  [ $# -ge 1 ] || fail "usage: printf %s TOKEN | sh install.sh URL [options of \`corral join\`]"
  url=${1%/}
  shift
  rm -f -- "${CORRAL_INSTALLER:-}" # the command line downloaded it to a temporary file
  [ -t 0 ] && fail "the join token is expected on standard input: printf %s TOKEN | sh install.sh $url"
  token=$(cat)
  [ -n "$token" ] || fail "standard input is empty: it should hold the join token"
  umask 022

  given=$(given_ca "$@")

  root=$(program_folder)
  version=$root/versions/$(printf %.16s "$SHA256")
  mkdir -p "$root/versions" 2>/dev/null || fail "cannot write to $root: choose another folder with CORRAL_DATA=FOLDER before the command"
  if [ -e "$version/.complete" ]; then
    say "Corral $VERSION is here already: $version"
  else
    rm -rf "$version" # of an installation that was interrupted
    install_into "$version"
  fi
  point_current "$root" "$version"
  link_command "$root/current/bin/corral"

  case $url in
    https:*) [ -z "$CA" ] || [ -n "$given" ] || set -- --ca "$CA" "$@" ;;
  esac
  exec "$version/bin/corral" join "$url" --token - "$@" <<TOKEN
$token
TOKEN
}

# The value of --ca among the options of `corral join`.
given_ca() {
  while [ $# -gt 0 ]; do
    case $1 in
      --ca) printf %s "${2:-}"; return ;;
      --ca=*) printf %s "${1#--ca=}"; return ;;
    esac
    shift
  done
}

program_folder() {
  if [ -n "${CORRAL_DATA:-}" ]; then
    echo "$CORRAL_DATA/corral"
  elif [ "$(id -u)" = 0 ]; then
    echo /var/lib/corral/corral
  elif [ -n "${HOME:-}" ]; then
    echo "$HOME/.local/share/corral/corral"
  else
    fail "HOME is not set: choose a folder with CORRAL_DATA=FOLDER before the command"
  fi
}

install_into() {
  version=$1
  python=$(find_python) || exit 1
  free=$(df -Pk "$(dirname "$version")" | awk 'NR == 2 { print $4 }')
  [ "${free:-0}" -ge 400000 ] || fail "$(dirname "$version") has $((${free:-0} / 1024)) MiB of free space, 400 MiB are needed: free some, or choose another folder with CORRAL_DATA=FOLDER before the command"
  say "installing Corral $VERSION into $version (Python: $python)"
  "$python" -m venv --without-pip "$version" || fail "$python cannot make an environment in $version"
  fetch=$version/fetch.py
  write_fetcher "$fetch"
  status=0
  printf %s "$token" | "$version/bin/python" -I "$fetch" "$url" "${given:-$CA}" "$WHEEL" "$SHA256" "$version/wheels" || status=$?
  [ "$status" = 0 ] || [ "$status" = 3 ] || exit "$status"
  install_packages "$version" "$status" >&2 || fail "the packages could not be installed; the reason is above. Run the same command again after that"
  rm -rf "$version/wheels" "$fetch"
  "$version/bin/corral" --version >/dev/null || fail "the installed Corral does not start: see above"
  : >"$version/.complete"
}

# 0: all packages are in the folder; 3: only Corral's own wheel is, and the package index has to be asked.
install_packages() {
  version=$1
  if [ "$2" = 0 ]; then
    set -- --no-index --find-links "$version/wheels"
  else
    set --
  fi
  set -- --require-hashes --only-binary :all: "$@" -r "$version/wheels/requirements.txt"
  if command -v uv >/dev/null 2>&1; then
    uv pip install --quiet --compile-bytecode --python "$version/bin/python" "$@"
  elif pip=$(ls "$version"/wheels/pip-*.whl 2>/dev/null); then
    "$version/bin/python" "$pip/pip" install --quiet --no-input --disable-pip-version-check "$@"
  elif "$version/bin/python" -m ensurepip >/dev/null 2>&1; then
    "$version/bin/python" -m pip install --quiet --no-input --disable-pip-version-check "$@"
  else
    say "this machine has neither uv nor pip, and the controller has no packages for it (see above): install python3-venv, or uv"
    return 1
  fi
}

find_python() {
  for name in python3 python3.14 python3.13 python3.12 python3.11; do
    found=$(command -v "$name" 2>/dev/null) || continue
    if "$found" -c 'import sys, venv; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
      echo "$found"
      return
    fi
  done
  if command -v uv >/dev/null 2>&1; then
    found=$(uv python find '>=3.11' 2>/dev/null) || { uv python install 3.12 >&2 && found=$(uv python find '>=3.11'); }
    if [ -n "$found" ]; then
      echo "$found"
      return
    fi
  fi
  if found=$(command -v python3 2>/dev/null); then
    if "$found" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
      fail "$found has no venv module: install it (Debian and Ubuntu: apt-get install python3-venv), then run the same command again"
    fi
    fail "Python 3.11 or later is needed, $found is $("$found" -c 'import platform; print(platform.python_version())'): install a later one, or uv, then run the same command again"
  fi
  fail "Python 3.11 or later is needed: install it (Debian and Ubuntu: apt-get install python3 python3-venv; macOS: brew install python), or uv, then run the same command again"
}

point_current() {
  ln -s "$2" "$1/current.new" 2>/dev/null || { rm -f "$1/current.new" && ln -s "$2" "$1/current.new"; } || fail "cannot write to $1"
  "$2/bin/python" -I -c 'import os, sys; os.replace(sys.argv[1], sys.argv[2])' "$1/current.new" "$1/current"
}

# The command `corral` for later; the fleet does not need it.
link_command() {
  if [ -n "${CORRAL_BIN:-}" ]; then
    bin=$CORRAL_BIN
  elif [ "$(id -u)" = 0 ]; then
    bin=/usr/local/bin
  else
    bin=${HOME:-}/.local/bin
  fi
  if [ -e "$bin/corral" ] && [ "$(readlink "$bin/corral" 2>/dev/null)" != "$1" ]; then
    say "there is another $bin/corral: it stays; the new one is $1"
  elif mkdir -p "$bin" 2>/dev/null && ln -sf "$1" "$bin/corral" 2>/dev/null; then
    case ":$PATH:" in
      *":$bin:"*) ;;
      *) say "the command is $bin/corral; add $bin to PATH to type only corral" ;;
    esac
  else
    say "cannot write to $bin: the command is $1"
  fi
}

write_fetcher() {
  cat >"$1" <<'PYTHON'
@FETCHER@
PYTHON
}

main "$@"
