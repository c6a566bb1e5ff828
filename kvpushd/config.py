# SPDX-License-Identifier: Apache-2.0
"""Where settings come from: defaults < TOML file < environment < flags.

Every value remembers where it came from, so that an error can say so.
"""

from __future__ import annotations

import argparse
import difflib
import socket
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_origin

from pydantic import ValidationError

from kvpushd import defaults
from kvpushd.errors import ConfigError
from kvpushd.settings import PREFIX, Faults, Option, Part, Settings, flatten, options

# In the environment, yet no fields: the file to read, and the consent to faults.
CONFIG = "KVPUSHD_CONFIG"
ALLOW_FAULTS = "KVPUSHD_ALLOW_FAULTS"


@dataclass(frozen=True, slots=True)
class Loaded:
    """What `read` found: the settings, where each given field came from, and what to do with them."""

    settings: Settings
    sources: Mapping[str, str]
    check_only: bool


class ConfigErrors(ConfigError):
    """The configuration is wrong; `lines` has one line per error."""

    def __init__(self, lines: Sequence[str]) -> None:
        super().__init__("; ".join(lines))
        self.lines = tuple(lines)


def parser() -> argparse.ArgumentParser:
    """The command line. Values are kept as text: the model says what is allowed."""
    made = argparse.ArgumentParser(
        prog="kvpushd",
        description="Moves the KV cache between LLM engines. Flags win over KVPUSHD_* variables, "
        "which win over the file, which wins over the defaults.",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    made.add_argument("--config", metavar="FILE", help=f"TOML file to read (or {CONFIG})")
    made.add_argument(
        "--check-config", action="store_true", help="print the effective configuration, or what is wrong"
    )
    for option in options():
        text = option.help.replace("%", "%%")
        if option.boolean:
            made.add_argument(
                option.flag, dest=option.field, nargs="?", const="true", metavar="BOOL", help=text
            )
        else:
            made.add_argument(option.flag, dest=option.field, metavar="VALUE", help=text)
    return made


def load(argv: Sequence[str], env: Mapping[str, str]) -> Settings:
    """The settings that flags, environment and file give together. Raises ConfigErrors."""
    return read(argv, env).settings


def read(argv: Sequence[str], env: Mapping[str, str]) -> Loaded:
    """As `load`, and where everything came from.

    Raises ConfigErrors, one line each. Unknown flags and `--help` end the process as argparse does.
    """
    given = vars(parser().parse_args(list(argv)))
    check_only = bool(given.pop("check_config", False))
    file = given.pop("config", None) or env.get(CONFIG)
    errors: list[str] = []
    known = {option.field: option for option in options()}
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    if file:
        for field, value in _from_file(Path(file), known, errors).items():
            values[field], sources[field] = value, file
    for field, value in _from_env(env, known, errors).items():
        values[field], sources[field] = value, f"environment {known[field].variable}"
    for field, value in given.items():
        values[field], sources[field] = value, f"flag {known[field].flag}"
    try:
        settings = _validated(values, sources, env)
    except ConfigErrors as error:
        raise ConfigErrors([*errors, *error.lines]) from None
    if errors:
        raise ConfigErrors(errors)
    if settings.faults != Faults() and env.get(ALLOW_FAULTS) != "1":
        where = ", ".join(f"{f} from {s}" for f, s in sources.items() if f.startswith("faults."))
        raise ConfigErrors([f"faults: only for tests; set {ALLOW_FAULTS}=1 to mean it ({where})"])
    return Loaded(settings, sources, check_only)


def describe(loaded: Loaded) -> str:
    """The effective configuration, one field a line, each with where it came from."""
    lines = [
        (f"{field} = {_toml(value)}", loaded.sources.get(field, "default"))
        for field, value in loaded.settings.flat().items()
    ]
    width = max(len(text) for text, _ in lines)
    return "\n".join(f"{text:<{width}}  # {source}" for text, source in lines)


def _from_file(file: Path, known: Mapping[str, Option], errors: list[str]) -> dict[str, Any]:
    try:
        with file.open("rb") as opened:
            tables = tomllib.load(opened)
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        errors.append(f"{file}: {reason}")
        return {}
    found: dict[str, Any] = {}
    for field, value in flatten(tables):
        if field in known:
            found[field] = value
        else:
            errors.append(_unknown(field, known, str(file)))
    return found


def _from_env(env: Mapping[str, str], known: Mapping[str, Option], errors: list[str]) -> dict[str, str]:
    by_variable = {option.variable: field for field, option in known.items()}
    found: dict[str, str] = {}
    for variable, text in env.items():
        if not variable.startswith(PREFIX) or variable in (CONFIG, ALLOW_FAULTS):
            continue
        if variable in by_variable:
            found[by_variable[variable]] = text
        else:
            errors.append(_unknown(variable, by_variable, "environment"))
    return found


def _unknown(name: str, known: Mapping[str, object], source: str) -> str:
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    hint = f"; did you mean {close[0]}?" if close else "; kvpushd --help lists what there is"
    return f"{name}: there is no such setting{hint} (from {source})"


def _validated(values: Mapping[str, Any], sources: Mapping[str, str], env: Mapping[str, str]) -> Settings:
    tree: dict[str, Any] = {}
    for field, value in values.items():
        *tables, name = field.split(".")
        inner = tree
        for table in tables:
            inner = inner.setdefault(table, {})
        inner[name] = value
    tree.setdefault("node", socket.gethostname())
    tree.setdefault("runtime_dir", defaults.runtime_dir(env))
    tree.setdefault("advertised_host", defaults.advertised_host(str(tree.get("peer_host", "0.0.0.0"))))
    try:
        return Settings.model_validate(tree)
    except ValidationError as error:
        raise ConfigErrors([_line(dict(found), sources) for found in error.errors()]) from None


def _line(found: dict[str, Any], sources: Mapping[str, str]) -> str:
    path = [str(part) for part in found["loc"]]
    prefixes = [".".join(path[:length]) for length in range(len(path), 0, -1)]
    field = next((prefix for prefix in prefixes if prefix in sources), "")
    wanted = str(found["msg"]).removeprefix("Value error, ")
    if not field:  # about several fields together: the message names them
        table = f"{path[0]}." if path else ""
        named = {name for name in sources if (table and name.startswith(table)) or name in wanted}
        origins = ", ".join(sorted({sources[name] for name in named}))
        return (f"{path[0]}: " if path else "") + wanted + (f" (from {origins})" if origins else "")
    wanted = wanted[:1].lower() + wanted[1:]
    allowed = "" if found["type"] == "value_error" else _allowed(field)
    return f"{field} = {_toml(found['input'])}: {wanted}{allowed} (from {sources[field]})"


def _allowed(field: str) -> str:
    part: type[Part] = Settings
    *tables, name = field.split(".")
    for table in tables:
        kind = part.model_fields[table].annotation
        assert isinstance(kind, type)
        part = kind
    info = part.model_fields[name]
    if get_origin(info.annotation) is Literal:
        return ""  # pydantic's own message lists them
    words = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than"}
    bounds = [
        f"{word} {value}"
        for attribute, word in words.items()
        for value in (getattr(meta, attribute, None) for meta in info.metadata)
        if value is not None
    ]
    return f"; allowed: {', '.join(bounds)}" if bounds else ""


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str | Path):
        text = str(value).replace("\\", "\\\\").replace('"', '\\"')
        return f'"{text}"'
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {_toml(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_toml(inner) for inner in value) + "]"
    return '""' if value is None else str(value)
