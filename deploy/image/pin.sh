#!/usr/bin/env bash
# deploy/image/pin.sh >images.env: the images that the Dockerfile and the compose files name by tag,
# by the digests that the tags have now. A tag can be moved to another image; a digest cannot.
#
#   docker compose --env-file images.env up --build
#   docker build --build-arg "$(grep '^PYTHON_IMAGE=' images.env)" -t doubly-sparse-softmax .
#
# Commit images.env beside your own deployment and run this again to update. It asks the registry
# through Docker, with the credentials that Docker has, or through the command in DOCKER.
set -euo pipefail
checkout=$(cd "$(dirname "$0")/../.." && pwd)
docker=${DOCKER:-docker}

{
    sed -n 's/^ARG \([A-Z]*_IMAGE\)=\(.*\)$/\1 \2/p' "$checkout/Dockerfile"
    sed -n 's/^ *image: \${\([A-Z]*_IMAGE\):-\(.*\)}$/\1 \2/p' \
        "$checkout/docker-compose.yml" "$checkout/deploy/compose/replicas.yml"
    # Kubernetes takes it as bundles.image.digest (Helm) or as images.digest (Kustomize).
    sed -n 's/^ *image: \(rclone\/.*\)$/RCLONE_IMAGE \1/p' "$checkout/deploy/kubernetes/components/bundles/deployment.yaml"
} | while read -r name image; do
    # Its input is not the list.
    digest=$("$docker" buildx imagetools inspect --format '{{.Manifest.Digest}}' "$image" </dev/null)
    if ! [[ $digest =~ ^sha256:[0-9a-f]{64}$ ]]; then
        echo "pin.sh: no digest of $image, but: ${digest:0:80}" >&2
        exit 1
    fi
    printf '# %s\n%s=%s@%s\n' "$image" "$name" "${image%:*}" "$digest"
done
