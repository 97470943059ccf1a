"""The command line: commands, the flags made from the settings table, and exit statuses.

Exit status 0: done; 1: `inspect` found a file that is not whole, or `selftest` a wrong result; 2: a
usage error, told in one sentence; 130: `convert` was interrupted. Heavy modules are imported by the
command that needs them, so that `--help` is instant.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from kslserve import __version__, config
from kslserve.errors import UsageError
from kslserve.setting import AUTO, Spec

EXIT_USAGE = 2
COMMANDS = {
    "serve": "serve a model over HTTP (the default command)",
    "convert": "write a model as one file; migrate a TQF1 file",
    "inspect": "describe and check a model file; plan its memory",
    "selftest": "compare a backend with the reference on this machine, and time it",
}


class Parser(argparse.ArgumentParser):
    """argparse whose errors are UsageError: one sentence instead of the whole usage text."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see --help)")


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit status."""
    arguments = list(arguments)
    command = arguments.pop(0) if arguments and arguments[0] in COMMANDS else "serve"
    try:
        if command == "convert":
            from kslserve.cli import convert

            parser = Parser(prog="kslserve convert", description=COMMANDS["convert"])
            convert.add_arguments(parser)
            return convert.run(parser.parse_args(arguments))
        if command == "inspect":
            from kslserve.cli import inspect

            parser = Parser(prog="kslserve inspect", description=COMMANDS["inspect"])
            inspect.add_arguments(parser)
            return inspect.run(parser.parse_args(arguments))
        if command == "selftest":
            from kslserve.cli import selftest

            parser = Parser(prog="kslserve selftest", description=COMMANDS["selftest"])
            selftest.add_arguments(parser)
            return selftest.run(parser.parse_args(arguments))
        return _serve(arguments)
    except UsageError as error:
        print(f"kslserve: {error}", file=sys.stderr)
        return EXIT_USAGE


def _serve(arguments: list[str]) -> int:
    given = vars(serve_parser().parse_args(arguments))
    config_file = given.pop("config", None)
    show = given.pop("print_config", False)
    loaded = config.load(given, config_file=config_file)
    if show:
        print(config.describe(loaded))
        return 0
    from kslserve.cli import serve

    return serve.run(loaded)


def serve_parser() -> Parser:
    """One flag per setting. Only flags that were given appear in the result, as raw text."""
    names = "\n".join(f"  {name:10}{text}" for name, text in COMMANDS.items())
    parser = Parser(
        prog="kslserve",
        description="A local LLM server for agentic coding clients.",
        epilog=f"commands:\n{names}\n\nEvery setting can also be given as KSL_NAME in the "
        "environment or as a key of the --config file.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument("--version", action="version", version=f"kslserve {__version__}")
    parser.add_argument("--config", metavar="FILE", help="TOML file of settings")
    parser.add_argument(
        "--print-config", action="store_true", help="print the merged settings and exit"
    )
    for name, (spec, default) in config.specs().items():
        if not spec.flag:
            continue
        help = f"{spec.help} (default: {_show_default(spec, default)})".replace("%", "%%")
        options: dict[str, Any] = {"dest": name, "help": help}
        if spec.kind == "switch":
            parser.add_argument(
                config.flag_of(name), action=argparse.BooleanOptionalAction, **options
            )
        elif spec.kind == "list":
            parser.add_argument(config.flag_of(name), action="append", metavar="TEXT", **options)
        else:
            metavar = "{" + ",".join(spec.choices) + "}" if spec.choices else spec.kind.upper()
            parser.add_argument(config.flag_of(name), metavar=metavar, **options)
    return parser


def _show_default(spec: Spec, default: Any) -> str:
    if spec.auto and default == AUTO:
        return "auto"
    if spec.kind == "switch":
        return "on" if default else "off"
    if spec.kind == "list" or default == "":
        return "none"
    if spec.kind == "bytes":
        for unit, shift in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
            if default and default % (1 << shift) == 0:
                return f"{default >> shift}{unit}"
    return f"{default:g}" if isinstance(default, float) else str(default)
