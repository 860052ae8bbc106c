#!/usr/bin/env bash
# Builds the image and runs it without a container engine: buildah builds the Dockerfile on a base
# made by debootstrap, and the result runs as process 1 of its own namespaces with the user, the
# environment, the entry point and the health check the image names - root file system read-only,
# no capabilities, models mounted read-only.
#
#   deploy/prove-image.sh [service|trainer]        (as root, on Debian or Ubuntu)
#
# PROVE_DIR      keep the base, the wheels and the image store here (default: a folder removed at the end)
# DEBIAN_MIRROR  where debootstrap takes its packages from (default: where apt takes them)
# PYTHON         a Python 3.11 whose pip can download the packages (default: python3)
set -euo pipefail

target=${1:-service}
checkout=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-python3}
user=10001:10001
port=$("$python" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')

say() { printf '%s\n' "-- $*"; }
fail() { printf 'prove-image: %s\n' "$*" >&2; exit 1; }

[ "$(id -u)" = 0 ] || fail "needs root, for debootstrap and for mounting"
case $target in service | trainer) ;; *) fail "the target is service or trainer, not $target" ;; esac
for tool in buildah debootstrap unshare setpriv "$python"; do
    command -v "$tool" >/dev/null || fail "$tool is not installed"
done
[ "$("$python" -c 'import sys; print(*sys.version_info[:2], sep=".")')" = 3.11 ] ||
    fail "$python is not Python 3.11, for which the wheels are downloaded"

if [ -n "${PROVE_DIR:-}" ]; then
    mkdir -p "$PROVE_DIR"
    dir=$(cd "$PROVE_DIR" && pwd)
else
    dir=$(mktemp -d)
fi
# vfs, the plainest driver, works inside other containers too.
buildah() { command buildah --root "$dir/storage" --runroot "$dir/run" --storage-driver vfs "$@"; }
container=
runner=
clean_up() {
    if [ -n "$runner" ]; then pkill -KILL --parent "$runner" || true; fi
    if [ -n "$container" ]; then buildah rm "$container" >/dev/null || true; fi
    if [ -z "${PROVE_DIR:-}" ]; then rm -rf "$dir"; fi
}
trap clean_up EXIT

# ---- the base image, under the name the Dockerfile asks for

base=$(sed -n 's/^FROM \([^ ]*\) AS base$/\1/p' "$checkout/Dockerfile")
if ! buildah inspect --type image "$base" >/dev/null 2>&1; then
    say "making $base with debootstrap"
    mirror=${DEBIAN_MIRROR:-$(apt-get indextargets --format '$(CODENAME) $(REPO_URI)' 'Created-By: Packages' |
        sed -n 's/^bookworm //p' | head -n 1)}
    rm -rf "$dir/base"
    debootstrap --variant=minbase --include=python3,python3-pip,python3-venv bookworm "$dir/base" \
        ${mirror:+"$mirror"} >"$dir/debootstrap.log" 2>&1 || fail "debootstrap failed: $(tail -n 3 "$dir/debootstrap.log")"
    ln -s python3 "$dir/base/usr/bin/python"
    rm -rf "$dir"/base/var/cache/apt/* "$dir"/base/var/lib/apt/lists/* "$dir"/base/usr/share/{doc,man,locale}/*
    scratch=$(buildah from scratch)
    buildah add --quiet "$scratch" "$dir/base" / >/dev/null
    buildah commit --quiet --rm "$scratch" "$base" >/dev/null
    rm -rf "$dir/base"
fi

# ---- the packages, so that the build needs no network

say "downloading the packages of the $target"
mkdir -p "$dir/wheels"
"$python" - "$checkout/pyproject.toml" "$target" >"$dir/requirements.txt" <<'PYTHON'
import sys
import tomllib

with open(sys.argv[1], "rb") as file:
    config = tomllib.load(file)
wanted = config["build-system"]["requires"] + config["project"]["dependencies"]
if sys.argv[2] == "trainer":
    wanted += config["project"]["optional-dependencies"]["train"]
print(*wanted, sep="\n")
PYTHON
"$python" -m pip download --quiet --only-binary=:all: --dest "$dir/wheels" \
    -r "$dir/requirements.txt" -c "$checkout/constraints.txt" >"$dir/download.log" 2>&1 ||
    fail "the download failed: $(tail -n 3 "$dir/download.log")"

# ---- the image

say "building the target $target"
printf '[global]\nno-index = true\nfind-links = /wheels\n' >"$dir/pip.conf"
image=doubly-sparse-softmax-$target
buildah bud --quiet --isolation chroot --format docker --target "$target" --tag "$image" \
    --volume "$dir/wheels:/wheels:ro" --volume "$dir/pip.conf:/etc/pip.conf:ro" \
    "$checkout" >"$dir/build.log" 2>&1 || fail "the build failed: $(tail -n 5 "$dir/build.log")"

container=$(buildah from --pull-never "$image")
root=$(buildah mount "$container")
of_image() { buildah inspect --type image --format "$1" "$image"; }
of_root() { find "$root" -xdev "$@"; }

say "unpacked: $(du -smx "$root" | cut -f 1) MB, of which packages $(du -sm "$root/opt/venv" | cut -f 1) MB"
[ "$(of_image '{{.Docker.Config.User}}')" = "$user" ] || fail "the image does not run as $user"
[ -n "$(of_image '{{index .Docker.Config.Labels "org.opencontainers.image.title"}}')" ] || fail "the image has no labels"
[ -z "$(of_root \( -name gcc -o -name cc -o -name make \) -path '*bin/*')" ] || fail "the image holds a compiler"
[ -z "$(of_root -path '*/.cache/pip' -o -path "$root/wheels/*")" ] || fail "the image holds pip's cache"
[ ! -e "$root/opt/venv/bin/pip" ] || fail "the virtual environment holds pip"
has_torch=$(of_root -type d -path '*/site-packages/torch' | head -n 1)
if [ "$target" = service ]; then
    [ -z "$has_torch" ] || fail "the service image holds torch"
else
    [ -n "$has_torch" ] || fail "the trainer image lacks torch"
fi

# ---- running it

mapfile -t environment < <(of_image '{{range .Docker.Config.Env}}{{println .}}{{end}}' | sed '/^$/d')
mapfile -t entrypoint < <(of_image '{{range .Docker.Config.Entrypoint}}{{println .}}{{end}}' | sed '/^$/d')
mapfile -t command < <(of_image '{{range .Docker.Config.Cmd}}{{println .}}{{end}}' | sed '/^$/d')
workdir=$(of_image '{{.Docker.Config.WorkingDir}}')

# Everything is mounted in a namespace of its own, so nothing is left to unmount.
enter() { # enter SOURCE:TARGET:ro|rw or '' COMMAND...
    unshare --mount --pid --fork --kill-child -- bash -euc '
        root=$1 user=$2 workdir=$3
        IFS=: read -r source target mode <<<"$4"
        shift 4
        mount --bind "$root" "$root"
        mount -t proc proc "$root/proc"
        mount -t tmpfs -o size=64m,mode=1777 tmpfs "$root/tmp"
        mount -t tmpfs -o size=1m tmpfs "$root/dev"
        for device in null zero urandom; do
            touch "$root/dev/$device"
            mount --bind "/dev/$device" "$root/dev/$device"
        done
        if [ -n "$source" ]; then
            mount --bind "$source" "$root$target"
            mount -o "remount,bind,$mode" "$root$target"
        fi
        mount -o remount,bind,ro "$root"
        exec chroot "$root" setpriv --reuid "${user%:*}" --regid "${user#*:}" --clear-groups \
            --no-new-privs --bounding-set=-all --inh-caps=-all \
            env --ignore-environment --chdir "$workdir" "$@"
    ' prove-image "$root" "$user" "$workdir" "$@"
}

confined=$(enter '' "${environment[@]}" python -c '
import os, sys
for path in "/", os.getcwd(), "/opt/venv":
    try:
        open(os.path.join(path, "x"), "w")
    except OSError as error:
        reason = error.strerror
    else:
        sys.exit(f"{path} can be written to")
print(f"{reason}; uid {os.getuid()}, process {os.getpid()}")') || fail "the root file system is not read-only"
say "root file system: $confined"

if [ "$target" = trainer ]; then
    rm -rf "$dir/data"
    mkdir "$dir/data"
    chown "$user" "$dir/data"
    dss() { enter "$dir/data:/data:rw" "${environment[@]}" "${entrypoint[@]}" "$@" >"$dir/trainer.log" 2>&1 ||
        fail "dss $* failed: $(tail -n 3 "$dir/trainer.log")"; }
    dss "${command[@]}"
    dss train --task synthetic --size 10x10 --no-baseline --out runs/proof
    say "trained: $(tail -n 1 "$dir/trainer.log")"
    dss export runs/proof models/proof/1
    dss verify models/proof/1
    say "exported: $(tail -n 1 "$dir/trainer.log")"
    exit 0
fi

carried=$(enter '' "${environment[@]}" dss verify /models/demo/1) || fail "the demo model in the image is not good"
say "carried: $carried"

enter "$checkout/models:/models:ro" "${environment[@]}" DSS_PORT="$port" "${entrypoint[@]}" "${command[@]}" >"$dir/service.log" 2>&1 &
runner=$!

# The image's own health check, until it passes.
mapfile -t healthcheck < <(of_image '{{range .Docker.Config.Healthcheck.Test}}{{println .}}{{end}}' | sed '/^$/d')
[ "${healthcheck[0]}" = CMD ] || fail "the health check is not in the exec form"
healthy=
for _ in $(seq 30); do
    kill -0 "$runner" 2>/dev/null || fail "the service stopped by itself: $(tail -n 3 "$dir/service.log")"
    if enter '' "${environment[@]}" DSS_PORT="$port" "${healthcheck[@]:1}" 2>/dev/null; then healthy=yes && break; fi
    sleep 1
done
[ -n "$healthy" ] || fail "the health check did not pass in 30 tries: $(tail -n 3 "$dir/service.log")"
say "healthy"

"$python" - "http://127.0.0.1:$port" "$checkout/models/demo/1/samples.npy" <<'PYTHON'
import json
import sys
import urllib.request
from pathlib import Path

url, samples = sys.argv[1], Path(sys.argv[2])
ask = urllib.request.build_opener(urllib.request.ProxyHandler({})).open
for probe in "/livez", "/startupz", "/metrics":
    assert ask(url + probe).status == 200, probe
headers = {"content-type": "application/x-npy", "accept": "application/json"}
answer = json.load(ask(urllib.request.Request(f"{url}/models/demo/topk", samples.read_bytes(), headers)))
print(f"-- /models/demo/topk: {len(answer['classes'])} rows, the first is", answer["classes"][0])
PYTHON

process=$(pgrep --parent "$(pgrep --parent "$runner")") # this shell's child is unshare
started=$(date +%s%N)
kill -TERM "$process"
status=0
wait "$runner" || status=$?
runner=
[ "$status" = 0 ] || fail "SIGTERM ended the service with status $status: $(tail -n 3 "$dir/service.log")"
say "SIGTERM: exit status 0 after $((($(date +%s%N) - started) / 1000000)) ms"
