"""`python -m kslserve convert SOURCE DEST`: write a model as one file; or migrate a TQF1 file."""

from __future__ import annotations

import argparse
import signal
import sys
import threading
from types import FrameType
from typing import Any

from kslserve.errors import UsageError

EXIT_INTERRUPTED = 130


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Write a model folder, container or KSL1 file as one file; with --migrate, change the "
        "signature of a TQF1 file to KSL1 and rename it."
    )
    parser.add_argument("source", metavar="SOURCE", help="folder, container file or KSL1 file")
    parser.add_argument("destination", metavar="DEST", help="file to write; it must not exist")
    parser.add_argument(
        "--format",
        choices=("container", "ksl1"),
        default="container",
        help="container: the whole model, any encoding; ksl1: FP6 weights alone, ties of codes "
        "to the smaller magnitude (default: container)",
    )
    parser.add_argument(
        "--weights",
        choices=("auto", "fp6", "nvfp4", "nvfp4-mlp", "bf16"),
        default="auto",
        help="weight encoding; auto: a quantized file's own, else fp6",
    )
    parser.add_argument(
        "--head",
        choices=("auto", "fp6", "nvfp4", "bf16"),
        default="auto",
        help="encoding of the output head; auto: fp6, or bf16 with --weights bf16",
    )
    parser.add_argument(
        "--model-dir",
        default="",
        metavar="DIR",
        help="folder with tokenizer, template and configs, for sources without them",
    )
    parser.add_argument(
        "--mtp",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="keep the MTP head (default: yes)",
    )
    parser.add_argument(
        "--verify", action="store_true", help="read the file back before it gets its name"
    )
    parser.add_argument(
        "--migrate",
        action="store_true",
        help="SOURCE is a TQF1 file: change its four signature bytes and rename it to DEST",
    )


def run(args: argparse.Namespace) -> int:
    """Convert or migrate; the exit status. Raises ModelFileError or UsageError."""
    if args.migrate:
        return _migrate(args)
    from kslserve.cli.progress import BarProgress, LineProgress
    from kslserve.ksl.convert import convert

    bar = BarProgress(sys.stdout) if sys.stdout.isatty() else None
    previous = _interrupt_on_terminate()
    try:
        done = convert(
            args.source,
            args.destination,
            weights=args.weights,
            head=args.head,
            file_format=args.format,
            model_dir=args.model_dir,
            mtp=args.mtp,
            check=args.verify,
            progress=bar or LineProgress(sys.stdout),
        )
    except KeyboardInterrupt:
        _end_bar(bar)
        print("kslserve: interrupted; nothing was written.", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BaseException:
        _end_bar(bar)
        raise
    finally:
        if previous is not None:
            signal.signal(signal.SIGTERM, previous)
    _end_bar(bar)
    for note in done.notes:
        print(f"note: {note}")
    print(f"{done.path}: {done.size} bytes, weights {done.weights}, head {done.head}")
    return 0


def _migrate(args: argparse.Namespace) -> int:
    from kslserve.ksl.migrate import migrate

    plain = (args.format, args.weights, args.head, args.model_dir, args.mtp, args.verify)
    if plain != ("container", "auto", "auto", "", True, False):
        raise UsageError("--migrate changes four bytes and a name; it takes no other option.")
    done = migrate(args.source, args.destination)
    if done.other_names:
        print(f"note: {done.other_names} other names of the same file have the new signature too")
    print(f"{done.path}: KSL1 now; run `kslserve inspect` on it before serving it")
    return 0


def _end_bar(bar: object) -> None:
    from kslserve.cli.progress import BarProgress

    if isinstance(bar, BarProgress):
        bar.bar.clear()


def _interrupt_on_terminate() -> Any:
    """Let SIGTERM end a conversion as Ctrl-C does, cleaning up. Returns the handler before; None
    where handlers cannot be set."""
    if threading.current_thread() is not threading.main_thread():
        return None

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    return signal.signal(signal.SIGTERM, interrupt)
