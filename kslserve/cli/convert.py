"""`python -m kslserve convert SOURCE DEST`: write a model as a single-file container."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Write a model folder (or container) as a single-file container."
    parser.add_argument("source", metavar="SOURCE", help="Hugging Face folder, or container file")
    parser.add_argument("destination", metavar="DEST", help="file to write; it must not exist")
    parser.add_argument(
        "--weights",
        choices=("auto", "fp6", "nvfp4", "nvfp4-mlp", "bf16"),
        default="auto",
        help="weight encoding; auto: a container's own, else fp6",
    )
    parser.add_argument(
        "--head",
        choices=("auto", "fp6", "nvfp4", "bf16"),
        default="auto",
        help="encoding of the output head; auto: fp6, or bf16 with --weights bf16",
    )


def run(args: argparse.Namespace) -> int:
    """Convert, with one line per layer on standard output. Raises ModelFileError."""
    from kslserve.ksl.convert import convert

    done = convert(
        args.source,
        args.destination,
        weights=args.weights,
        head=args.head,
        progress=lambda line: print(line, flush=True),
    )
    for note in done.notes:
        print(f"note: {note}")
    print(f"{done.path}: {done.size} bytes, weights {done.weights}, head {done.head}")
    return 0
