#!/bin/sh
# Copies bundles $SOURCE/<name>/<version>/ to $TARGET: those that $BUNDLES names, or else all.
#
# A manifest says that its bundle is whole (docs/models.md). So a version is copied only if its
# manifest is there before its files are read, and the copy's own manifest appears last.
set -eu
: "${SOURCE:?names no folder of the storage}" "${TARGET:?names no folder to copy to}"
SOURCE=${SOURCE%/} # and folders are named with a slash, lest rclone asks whether they are files
trap 'rm -f "$TARGET"/.manifest.*' EXIT

bundles=${BUNDLES:-}
if [ -z "$bundles" ]; then
    # What the server would look at: a name, and a version without leading zero.
    manifests=$(rclone lsf --recursive --files-only --max-depth 3 \
        --include '/{{[A-Za-z0-9][A-Za-z0-9._-]*}}/{{[1-9][0-9]*}}/manifest.json' "$SOURCE/")
    for manifest in $manifests; do
        bundles="$bundles ${manifest%/manifest.json}"
    done
fi
if [ -z "$bundles" ]; then
    echo "There is no bundle in $SOURCE." >&2
    exit 1
fi

for bundle in $bundles; do
    manifest=$(mktemp "$TARGET/.manifest.XXXXXX")
    rclone copyto "$SOURCE/$bundle/manifest.json" "$manifest" || {
        echo "The manifest of $bundle cannot be had from $SOURCE." >&2
        exit 1
    }
    rm -f "$TARGET/$bundle/manifest.json" # of an earlier try
    rclone sync --checksum --exclude /manifest.json "$SOURCE/$bundle/" "$TARGET/$bundle"
    mv "$manifest" "$TARGET/$bundle/manifest.json"
    echo "Copied $bundle."
done
# Labels belong to models, and most have none.
rclone copy --max-depth 2 --include '/*/labels.json' "$SOURCE/" "$TARGET"
