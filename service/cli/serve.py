"""`dss serve`."""

from pathlib import Path

import click

SECTIONS = {  # flags of `dss serve` that are settings of a section
    "keys_file": ("access", "keys_file"),
    "tls_cert": ("tls", "cert"),
    "tls_key": ("tls", "key"),
    "tls_ca": ("tls", "ca"),
}


@click.command()
@click.option("--models", type=click.Path(path_type=Path), help="Folder of <name>/<version>/.")
@click.option("--default-model", help="Which model POST /topk asks [the first by name].")
@click.option("--host", help="Address to listen on [127.0.0.1].")
@click.option("--port", type=int, help="Port to listen on [8000].")
@click.option("--workers", help="Processes that answer, or auto: one for each CPU [1].")
@click.option("--log-level", help="debug, info, warning or error [info].")
@click.option("--log-format", help="text or json [text].")
@click.option("--drain-seconds", type=float, help="Answer this long after SIGTERM [3].")
@click.option("--keys-file", type=click.Path(path_type=Path), help="TOML file of API keys.")
@click.option("--tls-cert", type=click.Path(path_type=Path), help="Certificate, PEM: speak TLS.")
@click.option("--tls-key", type=click.Path(path_type=Path), help="Its private key, PEM.")
@click.option(
    "--tls-ca",
    type=click.Path(path_type=Path),
    help="CA certificates, PEM: clients must show a certificate signed by one of them.",
)
@click.option(
    "--config",
    type=click.Path(path_type=Path),
    envvar="DSS_CONFIG",
    help="TOML file of settings; DSS_* variables override it, and flags override those.",
)
def serve(config: Path | None, **flags: object) -> None:
    """Answer top-k requests over HTTP."""
    from service import settings
    from service.http.auth import access, keys, tls

    loaded = settings.load(_nested(flags), config)
    # Keys and certificates that cannot be used are refused here, once, rather than by each worker.
    keys.KeyRing(access.configured(loaded.access))
    if loaded.tls.cert is not None:
        tls.make_context(loaded.tls)
    if loaded.workers > 1:
        from service.server import supervisor  # which imports no server, so that it stays small

        supervisor.supervise(loaded)
    else:
        from service.server import server

        server.serve(loaded)


def _nested(flags: dict[str, object]) -> dict[str, object]:
    """The flags that were given, those of a section under its name."""
    given: dict[str, object] = {}
    for name, value in flags.items():
        if value is None:
            continue
        section, part = SECTIONS.get(name, (None, name))
        inner = given if section is None else given.setdefault(section, {})
        assert isinstance(inner, dict)  # noqa: S101
        inner[part] = value
    return given
