#!/usr/bin/env bash
# Builds the image and runs it without a container engine: buildah builds the Dockerfile on a base
# made by debootstrap, and the result runs as process 1 of its own namespaces with the user, the
# environment, the entry point and the health check the image names - root file system read-only,
# no capabilities, models mounted read-only.
#
#   deploy/image/test.sh [service|trainer]        (as root, on Debian or Ubuntu)
#
# IMAGE_TEST_DIR      keep the base and the wheels here (default: a folder removed at the end)
# DEBIAN_MIRROR  where debootstrap takes its packages from (default: where apt takes them)
# PYTHON         a Python 3.11 whose pip can download the packages (default: python3)
set -euo pipefail

target=${1:-service}
checkout=$(cd "$(dirname "$0")/../.." && pwd)
checks=$checkout/deploy/image/checks
python=${PYTHON:-python3}
user=10001:10001
most_mb=480

say() { printf -- '-- [%3d s] %s\n' "$SECONDS" "$*"; }
fail() { printf 'image/test.sh: %s\n' "$*" >&2; exit 1; }
cannot() { printf 'image/test.sh: %s\n' "$*" >&2; exit 77; } # nothing was tried

case $target in service | trainer) ;; *) fail "the target is service or trainer, not $target" ;; esac
missing=
for tool in buildah:buildah debootstrap:debootstrap unshare:util-linux setpriv:util-linux pgrep:procps; do
    command -v "${tool%:*}" >/dev/null || [[ "$missing " == *" ${tool#*:} "* ]] || missing="$missing ${tool#*:}"
done
[ -z "$missing" ] || cannot "this needs tools that are not installed; as root: apt-get install$missing"
[ "$(id -u)" = 0 ] || cannot "this needs root, for debootstrap and for mounting"
unshare --mount true 2>/dev/null || cannot "this needs to mount, which is not allowed here"
# In a namespace of its own, so that no mount is left behind, however this ends.
[ -n "${IMAGE_TEST_INSIDE:-}" ] || IMAGE_TEST_INSIDE=yes exec unshare --mount -- "$0" "$@"
[ "$("$python" -c 'import sys; print(*sys.version_info[:2], sep=".")')" = 3.11 ] ||
    cannot "$python is not Python 3.11, for which the wheels are downloaded"
port=$("$python" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')

if [ -n "${IMAGE_TEST_DIR:-}" ]; then
    mkdir -p "$IMAGE_TEST_DIR"
    dir=$(cd "$IMAGE_TEST_DIR" && pwd)
else
    dir=$(mktemp -d)
fi
# overlay where it can be mounted; vfs, which copies everything for each stage, works everywhere.
driver=vfs
mkdir -p "$dir/overlay"/{lower,upper,work,merged}
if mount -t overlay overlay "$dir/overlay/merged" \
    -o "lowerdir=$dir/overlay/lower,upperdir=$dir/overlay/upper,workdir=$dir/overlay/work" 2>/dev/null; then
    umount "$dir/overlay/merged"
    driver=overlay
fi
buildah() { command buildah --root "$dir/storage-$driver" --runroot "$dir/run" --storage-driver "$driver" "$@"; }
runner=
inside() { # the first process of the namespace, with which all others end; this shell's child is unshare
    pgrep --parent "$(pgrep --parent "$runner")"
}
clean_up() {
    if [ -n "$runner" ]; then kill -KILL "$(inside)" || true; fi
    buildah rm --all >/dev/null 2>&1 || true
    buildah rmi --prune >/dev/null 2>&1 || true # of earlier stages
    awk -v dir="$dir/" 'index($2, dir) == 1 { print $2 }' /proc/self/mounts | sort -r | xargs --no-run-if-empty umount --lazy
    if [ -z "${IMAGE_TEST_DIR:-}" ]; then rm -rf "$dir"; fi
}
trap clean_up EXIT

# ---- the packages, so that the build needs no index; at the same time as the base

download() {
    mkdir -p "$dir/wheels"
    local fetch=("$python" -m pip download --quiet --only-binary=:all: --dest "$dir/wheels" --find-links "$dir/wheels")
    "${fetch[@]}" --require-hashes -r "$checkout/deploy/requirements/service.txt" \
        -r "$checkout/deploy/requirements/build.txt" >"$dir/download.log" 2>&1 || return 1
    if [ "$target" = trainer ]; then
        "$python" "$checks/requirements.py" "$checkout/pyproject.toml" >"$dir/requirements.txt"
        "${fetch[@]}" -r "$dir/requirements.txt" -c "$checkout/constraints.txt" >>"$dir/download.log" 2>&1
    fi
}
say "downloading the packages of the $target"
download &
downloading=$!

# ---- the base image, under the name the Dockerfile asks for

base=$(sed -n 's/^ARG PYTHON_IMAGE=//p' "$checkout/Dockerfile")
if ! buildah inspect --type image "$base" >/dev/null 2>&1; then
    say "making $base with debootstrap"
    mirror=${DEBIAN_MIRROR:-$(apt-get indextargets --format '$(CODENAME) $(REPO_URI)' 'Created-By: Packages' |
        sed -n 's/^bookworm //p' | head -n 1)}
    rm -rf "$dir/base"
    debootstrap --variant=minbase --include=python3,python3-pip,python3-venv bookworm "$dir/base" \
        ${mirror:+"$mirror"} >"$dir/debootstrap.log" 2>&1 || fail "debootstrap failed: $(tail -n 3 "$dir/debootstrap.log")"
    ln -s python3 "$dir/base/usr/bin/python"
    # The real one has neither of these: documents, translations, byte code.
    rm -rf "$dir"/base/var/cache/apt/* "$dir"/base/var/lib/apt/lists/* "$dir"/base/usr/share/{doc,man,locale}/*
    find "$dir/base/usr" -name __pycache__ -prune -exec rm -rf {} +
    scratch=$(buildah from scratch)
    buildah add --quiet "$scratch" "$dir/base" / >/dev/null
    buildah commit --quiet --rm "$scratch" "$base" >/dev/null
    rm -rf "$dir/base"
fi
wait "$downloading" || fail "the download failed: $(tail -n 3 "$dir/download.log")"

# ---- the image

say "building the target $target, on $driver"
printf '[global]\nno-index = true\nfind-links = /wheels\n' >"$dir/pip.conf"
image=doubly-sparse-softmax-$target
revision=$(git -C "$checkout" rev-parse HEAD 2>/dev/null || echo unknown)
buildah bud --isolation chroot --format docker --target "$target" --tag "$image" \
    --build-arg VERSION=proof --build-arg REVISION="$revision" \
    --volume "$dir/wheels:/wheels:ro" --volume "$dir/pip.conf:/etc/pip.conf:ro" \
    "$checkout" >"$dir/build.log" 2>&1 || fail "the build failed: $(tail -n 5 "$dir/build.log")"

container=$(buildah from --pull-never "$image")
root=$(buildah mount "$container")
of_image() { buildah inspect --type image --format "$1" "$image"; }
lines_of_image() { of_image "{{range $1}}{{println .}}{{end}}" | sed '/^$/d'; }
label() { of_image "{{index .Docker.Config.Labels \"org.opencontainers.image.$1\"}}"; }
of_root() { find "$root" -xdev "$@"; }

size=$(du -smx "$root" | cut -f 1)
say "unpacked: $size MB, of which packages $(du -sm "$root/opt/venv" | cut -f 1) MB"
[ "$(of_image '{{.Docker.Config.User}}')" = "$user" ] || fail "the image does not run as $user"
[ -n "$(label title)" ] || fail "the image has no title"
[ "$(label version) $(label revision)" = "proof $revision" ] || fail "the image's labels do not name its version"
[ -z "$(of_root \( -name 'gcc*' -o -name cc -o -name make -o -name ld -o -name strip \) -path '*bin/*')" ] ||
    fail "the image holds a compiler or its tools"
[ -z "$(of_root -path '*/.cache/pip' -o -path "$root/wheels/*")" ] || fail "the image holds pip's cache"
[ ! -e "$root/opt/venv/bin/pip" ] || fail "the virtual environment holds pip"
has_torch=$(of_root -type d -path '*/site-packages/torch' | head -n 1)
if [ "$target" = service ]; then
    [ -z "$has_torch" ] || fail "the service image holds torch"
    [ "$size" -lt "$most_mb" ] || fail "the service image takes $size MB, and may not take $most_mb"
else
    [ -n "$has_torch" ] || fail "the trainer image lacks torch"
fi

# ---- running it

mapfile -t environment < <(lines_of_image .Docker.Config.Env)
mapfile -t entrypoint < <(lines_of_image .Docker.Config.Entrypoint)
mapfile -t command < <(lines_of_image .Docker.Config.Cmd)
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
        mkdir "$root/dev/shm"
        mount -t tmpfs -o size=64m,mode=1777 tmpfs "$root/dev/shm"
        if [ -n "$source" ]; then
            mount --bind "$source" "$root$target"
            mount -o "remount,bind,$mode" "$root$target"
        fi
        mount -o remount,bind,ro "$root"
        exec chroot "$root" setpriv --reuid "${user%:*}" --regid "${user#*:}" --clear-groups \
            --no-new-privs --bounding-set=-all --inh-caps=-all \
            env --ignore-environment --chdir "$workdir" "$@"
    ' image-test "$root" "$user" "$workdir" "$@"
}
in_image() { # in_image MOUNT CHECK ARGUMENT...: one of the checks, by the image's own Python
    enter "$1" "${environment[@]}" python -c "$(cat "$checks/$2")" "${@:3}"
}
models=$checkout/models:/models:ro

said=$(in_image '' confined.py / /opt/venv "$workdir") || fail "the root file system is not read-only"
say "confined: $said"
said=$(in_image '' pinned.py "$(cat "$checkout/constraints.txt")") || fail "not all packages are those of constraints.txt"
say "pinned: $said"
if [ "$target" = service ]; then
    said=$(in_image '' materials.py /usr/share/doc/doubly-sparse-softmax/sbom.cdx.json) ||
        fail "the bill of materials is not that of the image"
    say "bill of materials: $said"
fi

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

said=$(in_image "$models" confined.py /models) || fail "the models are not mounted read-only"
said=$(enter '' "${environment[@]}" dss verify /models/demo/1) || fail "the demo model in the image is not good"
say "carried: $said"
said=$(in_image '' engines.py /models/demo/1) || fail "the engines in the image are not as they should be"
say "engines: $said"
mapfile -t healthcheck < <(lines_of_image .Docker.Config.Healthcheck.Test)
[ "${healthcheck[0]}" = CMD ] || fail "the health check is not in the exec form"

for workers in 1 2; do
    here=(DSS_PORT="$port" DSS_WORKERS="$workers")
    started=$(date +%s%N)
    enter "$models" "${environment[@]}" "${here[@]}" "${entrypoint[@]}" "${command[@]}" \
        >"$dir/service.log" 2>&1 &
    runner=$!
    # The image's own health check, until it passes.
    healthy=
    for _ in $(seq 60); do
        kill -0 "$runner" 2>/dev/null || fail "the service stopped by itself: $(tail -n 3 "$dir/service.log")"
        if enter '' "${environment[@]}" "${here[@]}" "${healthcheck[@]:1}" 2>/dev/null; then healthy=yes && break; fi
        sleep 0.2
    done
    [ -n "$healthy" ] || fail "the health check did not pass: $(tail -n 3 "$dir/service.log")"
    say "$workers workers: healthy after $((($(date +%s%N) - started) / 1000000)) ms"

    process=$(inside)
    said=$("$python" "$checks/answers.py" "http://127.0.0.1:$port" "$checkout/models/demo/1/samples.npy") ||
        fail "the service does not answer as it should: $(tail -n 3 "$dir/service.log")"
    say "$workers workers: $said"
    [ ! -e "/proc/$process/root/tmp/.cache" ] || fail "the service compiled its loops when it started"

    started=$(date +%s%N)
    kill -TERM "$process"
    status=0
    wait "$runner" || status=$?
    runner=
    [ "$status" = 0 ] || fail "SIGTERM ended the service with status $status: $(tail -n 3 "$dir/service.log")"
    say "$workers workers: SIGTERM, exit status 0 after $((($(date +%s%N) - started) / 1000000)) ms"
done
