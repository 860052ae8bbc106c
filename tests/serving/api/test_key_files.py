"""Key files and key settings: reading, refusing and replacing keys, without a server."""

import asyncio
from pathlib import Path

import pytest
from click.testing import CliRunner
from helpers.api_keys import ADMIN, LATER, QUERY, UNKNOWN, write_keys

from service.cli.main import cli
from service.http.auth import keys
from service.http.auth.access import Access, Unauthorized
from service.settings import AccessSettings, Key

# --- files and settings -----------------------------------------------------------------------


def test_a_key_made_by_the_command_opens_what_it_should(tmp_path: Path) -> None:
    made = CliRunner().invoke(cli, ["keys", "new", "--name", "me", "--scopes", "query"])
    assert made.exit_code == 0
    token = made.stderr.split()[-1]
    assert token not in made.stdout
    file = tmp_path / "keys.toml"
    file.write_text(made.stdout)
    access = Access(AccessSettings(keys_file=file))
    access.check("query", [(b"authorization", f"Bearer {token}".encode())])
    with pytest.raises(Unauthorized):
        access.check("query", [(b"authorization", f"Bearer {token}x".encode())])


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "is wrong: keys: Field required"),
        ("keys = []", "holds no key"),
        ("keys = 1", "is wrong: keys"),
        (f'[[keys]]\nname = "{QUERY}', r"is not TOML \(at "),
        (f'[[keys]]\nname = "a"\nkey = "{QUERY}"', "keys.0.scopes: Field required"),
        (f'[[keys]]\nname = "a"\nkey = "{QUERY}"\nscopes = []', "keys.0.scopes"),
        (f'[[keys]]\nname = "a"\nkey = "{QUERY}"\nscopes = ["root"]', "'query' or 'admin'"),
        (f'[[keys]]\nname = "a b"\nkey = "{QUERY}"\nscopes = ["query"]', "keys.0.name"),
        ('[[keys]]\nname = "a"\nkey = "short"\nscopes = ["query"]', "16 to 256"),
        ('[[keys]]\nname = "a"\nsha256 = "ff"\nscopes = ["query"]', "keys.0.sha256"),
        (f'[[keys]]\nname = "a"\nkey = "{QUERY}"\ncolour = 1\nscopes = ["query"]', "colour"),
        ('[[keys]]\nname = "a"\nscopes = ["query"]', "keys.0.sha256: Field required"),
    ],
)
def test_a_server_does_not_start_with_a_wrong_file(
    tmp_path: Path, text: str, sentence: str
) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(text)
    with pytest.raises(keys.KeysWrong, match=sentence) as failure:
        keys.read(file)
    assert QUERY not in str(failure.value)
    started = CliRunner().invoke(cli, ["serve", "--keys-file", str(file)])
    assert started.exit_code == 1
    assert started.output == f"Error: {failure.value}\n"


def test_two_keys_need_two_names() -> None:
    made = [
        Key.model_validate({"name": "a", "key": token, "scopes": ["query"]})
        for token in (QUERY, ADMIN)
    ]
    with pytest.raises(keys.KeysWrong, match="same name"):
        keys.KeyRing(made)


def test_the_generation_grows_when_the_keys_do(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    write_keys(file, query="query")
    access = Access(AccessSettings(keys_file=file))
    asyncio.run(access.refresh())
    asyncio.run(access.refresh(now=True))
    assert access.generation == 0
    write_keys(file, query="query", admin="admin")
    asyncio.run(access.refresh())
    assert access.generation == 1


def test_every_key_is_compared_whichever_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []
    monkeypatch.setattr(keys, "compare_digest", lambda a, b: compared.append(a) or a == b)
    made = [
        Key.model_validate({"name": token, "key": token, "scopes": ["query"]})
        for token in (QUERY, ADMIN, LATER)
    ]
    ring = keys.KeyRing(made)
    for token, found in ((QUERY, made[0]), (LATER, made[2]), (UNKNOWN, None)):
        compared.clear()
        assert ring.find(token.encode()) == found
        assert len(compared) == len(made)
