"""Numbers as Grafana writes them."""

from collections.abc import Sequence

THOUSANDS = ((1e9, " Bil"), (1e6, " Mil"), (1e3, " K"), (1.0, ""))
SECONDS = ((1.0, " s"), (1e-3, " ms"), (1e-6, " µs"), (1e-9, " ns"))
BYTES = ((2.0**30, " GiB"), (2.0**20, " MiB"), (2.0**10, " KiB"), (1.0, " B"))
RATES = {"reqps": " req/s", "rowsps": " rows/s"}
SUFFIX = "suffix:"


class UnitUnknown(KeyError):
    """The picture would show a number otherwise than Grafana does."""


def written(value: float, unit: str, decimals: int | None = None) -> str:
    if unit == "percentunit":
        return f"{_digits(100 * value, decimals)}%"
    if unit == "s":
        return _scaled(value, SECONDS, decimals)
    if unit == "bytes":
        return _scaled(value, BYTES, decimals)
    if unit == "short":
        return _scaled(value, THOUSANDS, decimals)
    if unit in RATES:
        return _scaled(value, THOUSANDS, decimals) + RATES[unit]
    if unit.startswith(SUFFIX):
        return _digits(value, decimals) + unit.removeprefix(SUFFIX)
    raise UnitUnknown(unit)


def _scaled(value: float, scales: Sequence[tuple[float, str]], decimals: int | None) -> str:
    if value == 0:
        return "0" + (scales[0][1] if scales is SECONDS else scales[-1][1])
    factor, name = next((s for s in scales if abs(value) >= s[0]), scales[-1])
    return _digits(value / factor, decimals) + name


def _digits(value: float, decimals: int | None) -> str:
    """Three digits that count, unless it is said how many follow the point."""
    if decimals is not None:
        return f"{value:.{decimals}f}"
    places = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    if 0 < abs(value) < 0.01:
        return f"{value:.2g}"
    text = f"{value:.{places}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
