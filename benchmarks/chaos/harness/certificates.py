"""A certificate for a server on this machine, and the authority that clients know it by."""

from dataclasses import dataclass
from pathlib import Path

from benchmarks.chaos.harness.verdict import NotPossible
from service.bench.http_reader import HOST


@dataclass(frozen=True)
class Certificate:
    certificate: Path
    key: Path
    ca: Path

    @property
    def flags(self) -> tuple[str, ...]:
        return ("--tls-cert", str(self.certificate), "--tls-key", str(self.key))


def issue(folder: Path) -> Certificate:
    try:
        import trustme
    except ImportError as error:
        raise NotPossible("trustme is not installed: make test installs it.") from error
    folder.mkdir(parents=True, exist_ok=True)
    made = Certificate(folder / "cert.pem", folder / "key.pem", folder / "ca.pem")
    authority = trustme.CA()
    issued = authority.issue_cert(HOST)
    issued.private_key_pem.write_to_path(str(made.key))
    made.certificate.write_bytes(b"".join(pem.bytes() for pem in issued.cert_chain_pems))
    authority.cert_pem.write_to_path(str(made.ca))
    return made
