"""Files that come with an installed package, found without running any code of it."""

import importlib
from importlib import metadata
from pathlib import Path
from types import ModuleType

from service.errors import DSSError


class PackageAbsent(DSSError):
    pass


def package_files(package: str, ending: str, install: str) -> list[Path]:
    """Those whose path ends so; `install` is what pip is given where the package is absent."""
    try:
        listed = metadata.files(package) or []
    except metadata.PackageNotFoundError:
        raise PackageAbsent(
            f"{package} is not installed; pip install {install} brings its files."
        ) from None
    return [Path(str(file.locate())) for file in listed if str(file).endswith(ending)]


def imported(module: str, install: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        raise PackageAbsent(f"{module} is not installed; pip install {install} adds it.") from None
