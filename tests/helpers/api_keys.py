"""API keys that tests use, and a file of them."""

from pathlib import Path

from service.http.auth import keys

QUERY, ADMIN, LATER, UNKNOWN = (f"dss_{name * 20}" for name in "qaln")


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def write_keys(path: Path, **scopes: str) -> None:
    """Beside it first: a reader sees the old file or the new one."""
    tokens = {"query": QUERY, "admin": ADMIN, "later": LATER}
    lines = [keys.entry(name, tokens[name], [scope]) for name, scope in scopes.items()]
    unfinished = path.with_suffix(".new")
    unfinished.write_text("".join(lines))
    unfinished.rename(path)
