"""Numbers as people write them on a command line: 8k, 1M, 4GiB."""

import re

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_NUMBER = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgtKMGT]?)(i?)[bB]?")


def human_int(text: str) -> int:
    """An integer with an optional unit, by vLLM's rule: 8k is 8000, 8K is 8192.

    A size may end in B (4GB) or in iB (4GiB), which is binary whatever its case.

    Raises:
        ValueError: the text is no such number, or not a whole one.
    """
    match = _NUMBER.fullmatch(text.strip().replace("_", "").replace(",", ""))
    if match is None:
        raise ValueError(f"{text!r} is not a number such as 4096, 8k, 25.6k, 1M or 4GiB")
    digits, unit, binary = match.groups()
    factor = _BINARY[unit.upper()] if binary and unit else _BINARY.get(unit, _UNITS.get(unit, 1))
    value = float(digits) * factor if "." in digits else int(digits) * factor
    if value != int(value):
        raise ValueError(f"{text!r} is not a whole number")
    return int(value)
