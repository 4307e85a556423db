"""Defaults of the user's own: environment variables, and beneath them one TOML file.

    [edge]                              # run, chat, serve and doctor
    cloud = ["wss://cloud.example.org:7071"]
    max-tokens = 1024
    [cloud]                             # e2sci cloud
    slots = 8

Names are those of the flags; each command takes what it has an option for. A variable is the
section and the name, as in `E2SCI_EDGE_MAX_TOKENS`. What is stronger and where a value came from is
click's doing: variables are its `envvar`, the file becomes its `default_map`.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import tomllib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache, wraps
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource
from platformdirs import user_config_path

SECTIONS = {"edge": ("run", "chat", "serve", "doctor"), "cloud": ("cloud",)}
"""Which commands a section is for."""
DEFAULT = user_config_path("e2sci") / "config.toml"
VARIABLE = "E2SCI_CONFIG"
MAX_BYTES = 1 << 20
_OF_ONE_CALL = ("json", "trace")
_SECRET_NAME = re.compile(r"(api[-_]?)?key|(.*[-_])?(token|secret|password|bearer)", re.IGNORECASE)
_SECRET = re.compile(r"e2sci_[0-9a-f]{8}_[0-9a-f]{8}|://[^/\s]*@")
_HEADER = re.compile(r"\s*\[\s*([\w-]+)\s*\]")


class Unfit(click.ClickException):
    """The file can't be used: one line that says where and why."""

    exit_code = 2


@dataclass(frozen=True)
class Settings:
    """What the file says, by section and name; empty where there is no file."""

    path: Path
    text: str = ""
    values: dict[str, dict[str, Any]] = field(default_factory=dict)

    def where(self, section: str, name: str) -> str:
        """FILE:LINE of a value, or FILE where the line can't be told."""
        here = ""
        for number, line in enumerate(self.text.splitlines(), 1):
            header = _HEADER.match(line)
            here = header[1] if header else here
            if here == section and re.match(rf"\s*[\"']?{re.escape(name)}[\"']?\s*=", line):
                return f"{self.path}:{number}"
        return str(self.path)

    def default_map(self, root: click.Context) -> dict[str, Any]:
        """What click wants: values by command and by the command's own names for them."""
        found: dict[str, Any] = {}
        for section, commands in SECTIONS.items():
            values = self.values.get(section, {})
            for command in commands if values else ():
                known = configurable_options(command_of(root, command))
                found[command] = {
                    known[name].name: [value] if _alone(known[name], value) else value
                    for name, value in values.items()
                    if name in known
                }
        return found


def section_of(command: str | None) -> str | None:
    """The section that a command reads."""
    return next((name for name, commands in SECTIONS.items() if command in commands), None)


def command_of(root: click.Context, name: str) -> click.Command:
    """The command `name` of the whole command line, whose context is `root`."""
    assert isinstance(root.command, click.Group)
    command = root.command.get_command(root, name)
    assert command is not None
    return command


def configurable_options(command: click.Command) -> dict[str, click.Option]:
    """Options of a command that may be set beneath the flags, by their names in the file."""
    options = {
        next(opt for opt in param.opts if opt.startswith("--"))[2:]: param
        for param in command.params
        if isinstance(param, click.Option)
    }
    return {name: option for name, option in options.items() if name not in _OF_ONE_CALL}


def variable(section: str, name: str) -> str:
    """The environment variable of an option."""
    return f"E2SCI_{section}_{name}".upper().replace("-", "_")


@cache
def configurable(command: click.Command, section: str) -> click.Command:
    """Let the environment set what may be set of `command`, and its errors say what was."""
    for name, option in configurable_options(command).items():
        option.envvar = variable(section, name)
    if command.callback is not None:
        command.callback = _explained(command.callback)
    return command


# ---- reading ----------------------------------------------------------------------------------


def use(root: click.Context, file: Path | None) -> Settings:
    """Take the file's settings as click's defaults; none if `file` is None and there is none at the
    default place. Raises Unfit."""
    settings = _read(file)
    for section, found in settings.values.items():
        _check_section(settings, root, section, found)
    root.obj, root.default_map = settings, settings.default_map(root)
    return settings


def _read(file: Path | None) -> Settings:
    path = file or DEFAULT
    try:
        with path.open("rb") as stream:
            data = stream.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise Unfit(
                f"{path} is larger than {MAX_BYTES >> 20} MiB; expected a few lines of TOML"
            )
        text = data.decode()
        values = tomllib.loads(text)
    except FileNotFoundError:
        if file is None:
            return Settings(path)
        raise Unfit(f"there is no {path}; `e2sci --config {path} config init` writes one") from None
    except OSError as error:
        raise Unfit(f"can't read {path}: {error.strerror}") from None
    except ValueError as error:  # also what is no UTF-8
        reason = str(error).replace("\n", " ")
        raise Unfit(f"{path} is no TOML: {reason}") from None
    return Settings(path, text, values)


def _check_section(settings: Settings, root: click.Context, section: str, found: Any) -> None:
    if section not in SECTIONS:
        raise Unfit(f"{settings.path}: no section [{section}]; {_nearest(section, SECTIONS)}")
    if not isinstance(found, dict):
        raise Unfit(f"{settings.path}: {section} is no section; write [{section}] above its values")
    known: dict[str, list[click.Option]] = {}
    for command in SECTIONS[section]:
        for name, option in configurable_options(command_of(root, command)).items():
            known.setdefault(name, []).append(option)
    for name, value in found.items():
        where = settings.where(section, name)
        if _SECRET.search(repr(value)) or (name not in known and _SECRET_NAME.fullmatch(name)):
            raise Unfit(
                f"{where}: {name} looks like a secret, which has no place in this file; set "
                "E2SCI_API_KEY, or let key-file name a file that holds the key"
            )
        if name not in known:
            raise Unfit(f"{where}: [{section}] has no {name!r}; {_nearest(name, known)}")
        for option in known[name]:
            _check_value(where, name, option, value)


def _check_value(where: str, name: str, option: click.Option, value: Any) -> None:
    """Raises Unfit on a value that an option would not take."""
    values = value if option.multiple and isinstance(value, list) else [value]
    kinds, called = kind(option)
    if not all(isinstance(v, kinds) and isinstance(v, bool) == (kinds is bool) for v in values):
        raise Unfit(f"{where}: {name} is {json.dumps(value, default=str)}; expected {called}")
    try:
        option.type_cast_value(
            click.Context(click.Command(None)), values if option.multiple else value
        )
    except click.ClickException as error:
        raise Unfit(f"{where}: {name}: {error.message.rstrip('.')}") from None


def kind(option: click.Option) -> tuple[Any, str]:
    """The types that TOML must give for an option, and what these are called."""
    if option.is_bool_flag:
        return bool, "true or false"
    if isinstance(option.type, type(click.INT)):
        return int, "a whole number"
    if isinstance(option.type, type(click.FLOAT)):
        return (int, float), "a number"
    return str, "a text in quotes, or a list of such" if option.multiple else "a text in quotes"


def _alone(option: click.Option, value: Any) -> bool:
    return option.multiple and not isinstance(value, list)


def _nearest(name: str, known: Iterable[str]) -> str:
    names = list(known)
    close = difflib.get_close_matches(name.replace("_", "-"), names, 1)
    if close:
        return f"did you mean {close[0]!r}?"
    return "`e2sci config show` has all" if len(names) > 9 else f"it may be {', '.join(names)}"


# ---- errors -----------------------------------------------------------------------------------


def source(ctx: click.Context, name: str, option: click.Option) -> str | None:
    """Where an option's value was set, if beneath the flags."""
    section, settings = section_of(ctx.info_name), ctx.find_root().obj
    match ctx.get_parameter_source(option.name or ""):
        case ParameterSource.ENVIRONMENT:
            return str(option.envvar)
        case ParameterSource.DEFAULT_MAP if section and isinstance(settings, Settings):
            return settings.where(section, name)
    return None


def origins(ctx: click.Context, message: str) -> str:
    """Words on where the values that an error speaks of were set, for those not on the command
    line; empty if there are none."""
    told = [
        f"{name} is set by {place}"
        for name, option in configurable_options(ctx.command).items()
        if re.search(rf"\b(--)?({re.escape(name)}|{option.name})\b", message)
        and (place := source(ctx, name, option))
    ]
    return f" ({', '.join(told)})" if told else ""


def _explained(callback: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(callback)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        try:
            return callback(*args, **kwargs)
        except click.ClickException as error:
            told = origins(click.get_current_context(), error.message)
            vars(error)["message"] = error.message + told  # typed as final
            raise

    return wrapped


def own_variables() -> list[str]:
    """The environment's variables that look like an option's."""
    prefixes = tuple(variable(section, "") for section in SECTIONS)
    return sorted(name for name in os.environ if name.startswith(prefixes))
