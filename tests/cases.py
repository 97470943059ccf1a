"""`python -m tests.cases DIR`: runs every case of a folder of case files, of any kind.

One line per case, then `N passed, M failed`. The exit status is 1 if a case of level `must` failed;
`should` cases are reported. Files: `{"schema": 1, "cases": [...]}`; see tests.runners.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from tests.runners import files
from tests.runners.files import Case


def _parser(case: Case, folder: Path) -> None:
    from tests.runners.parser_cases import run_parser

    run_parser(case)


def _stop(case: Case, folder: Path) -> None:
    from tests.runners.parser_cases import run_stop

    run_stop(case)


def _bytes(case: Case, folder: Path) -> None:
    from tests.runners.parser_cases import run_bytes
    from tests.unit.text.text_support import nano

    run_bytes(case, nano())


def _template(case: Case, folder: Path) -> None:
    from tests.runners.template_cases import TEMPLATES, run_template

    for version in TEMPLATES:
        run_template(case, version)


def _sampling(case: Case, folder: Path) -> None:
    from tests.runners.sampling_cases import run_sampling

    run_sampling(case)


def _sampling_batch(case: Case, folder: Path) -> None:
    from tests.runners.sampling_cases import run_sampling_batch

    run_sampling_batch(case)


def _logprob_bytes(case: Case, folder: Path) -> None:
    from tests.runners.sampling_cases import run_logprob_bytes

    run_logprob_bytes(case)


def _api(case: Case, folder: Path) -> None:
    from tests.server.api_cases import run_case

    run_case(case, folder)


def _http(case: Case, folder: Path) -> None:
    from tests.runners.http_layer import run_http

    asyncio.run(run_http(case))


def _engine(case: Case, folder: Path) -> None:
    from tests.runners.engine_cases import run_engine

    run_engine(case, folder)


RUNNERS: dict[str, Callable[[Case, Path], None]] = {
    "parser": _parser,
    "stop": _stop,
    "bytes": _bytes,
    "template": _template,
    "sampling": _sampling,
    "sampling_batch": _sampling_batch,
    "logprob_bytes": _logprob_bytes,
    "api": _api,
    "http": _http,
    "engine": _engine,
}


def failure(case: Case) -> str | None:
    """Why a case does not hold, in one line; None if it holds."""
    runner = RUNNERS.get(case["kind"])
    if runner is None:
        return f"no runner for the kind {case['kind']!r}"
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()):
        try:
            runner(case, Path(folder))
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            text = " ".join(str(error).split()) or place.line or ""
            return f"{type(error).__name__} at {Path(place.filename).name}:{place.lineno}: {text}"
    return None


def main(argv: list[str]) -> int:
    if len(argv) != 1 or not Path(argv[0]).is_dir():
        print("usage: python -m tests.cases DIR", file=sys.stderr)
        return 2
    passed = failed = must_failed = 0
    for path in sorted(Path(argv[0]).glob("*.json")):
        for case in files.read(path):
            begun = time.monotonic()
            fault = failure(case)
            spent = f"{(time.monotonic() - begun) * 1000:.0f} ms"
            level = case.get("level", "must")
            name = f"{path.stem}/{case['id']}"
            if fault is None:
                passed += 1
                print(f"pass  {level:6}  {name}  {spent}", flush=True)
            else:
                failed += 1
                must_failed += level == "must"
                print(f"FAIL  {level:6}  {name}  {spent}  {fault[:400]}", flush=True)
    print(f"{passed} passed, {failed} failed ({must_failed} of level must)")
    return 1 if must_failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
