"""House rules that a machine can check."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import kslserve
from kslserve.engine import abi

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "kslserve"
NATIVE = [
    p
    for p in sorted((ROOT / "native").rglob("*"))
    if p.suffix in (".h", ".cc", ".inl", ".cu", ".cuh") and "tests" not in p.parts
]
# Calls that a wave, a request or a stranger's file must never reach.
BANNED_CALLS = {"eval", "exec", "os.system", "os.getenv", "os.putenv", "pickle.loads", "time.sleep"}


def trees() -> list[tuple[Path, ast.Module]]:
    return [(p, ast.parse(p.read_text(encoding="utf-8"))) for p in sorted(PACKAGE.rglob("*.py"))]


def dotted(node: ast.expr) -> str:
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    parts.append(node.id if isinstance(node, ast.Name) else "")
    return ".".join(reversed(parts))


def test_no_conflict_is_left_in_the_documents() -> None:
    for path in [*ROOT.glob("*.md"), *(ROOT / "native").glob("*.md")]:
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"^(<{7} |={7}$|>{7} )", text, re.M), f"{path} holds a merge conflict"


def test_every_bench_is_in_the_tree() -> None:
    tree = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    for path in (ROOT / "bench").glob("*.py"):
        assert re.search(rf"\b{re.escape(path.name)}\b", tree), f"{path.name} is not in the tree"


def test_one_environment_reader() -> None:
    for path, tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and dotted(node) == "os.environ":
                assert path.name == "config.py", f"{path}:{node.lineno} reads the environment"
    for path in NATIVE:
        assert "getenv" not in path.read_text(encoding="utf-8"), f"{path} reads the environment"


def test_banned_calls() -> None:
    for path, tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                name = dotted(node.func)
                assert name not in BANNED_CALLS, f"{path}:{node.lineno} calls {name}"
                # Tokenizer.encode holds the GIL for the whole text; encode_batch_fast does not.
                tokenizer = re.search(r"(^|[._])tokenizer\.encode$", name)
                own = path.name != "tokenizer.py"
                assert not tokenizer or own, f"{path}:{node.lineno} calls {name}"


def test_no_bare_except_and_no_global_state() -> None:
    for path, tree in trees():
        for node in ast.walk(tree):
            where = f"{path}:{getattr(node, 'lineno', 0)}"
            assert not isinstance(node, ast.Global), f"{where} has module-level mutable state"
            if isinstance(node, ast.ExceptHandler):
                assert node.type is not None, f"{where} swallows everything"
        for statement in tree.body:
            if isinstance(statement, ast.Assign) and isinstance(
                statement.value, (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp)
            ):
                for target in statement.targets:
                    if isinstance(target, ast.Name) and target.id != "__all__":
                        constant = target.id.lstrip("_").isupper()
                        assert constant, f"{path}:{statement.lineno}: {target.id} is mutable state"


def test_only_two_files_start_native_threads() -> None:
    for path in NATIVE:
        if re.search(r"pthread_create|std::thread\b", path.read_text(encoding="utf-8")):
            assert path.name in ("engine.cc", "pool.cc"), f"{path} starts a thread"


def test_native_language_is_small() -> None:
    banned = r"\b(throw|catch|dynamic_cast|typeid|iostream|std::regex|std::function)\b"
    for path in NATIVE:
        code = re.sub(r"//[^\n]*|/\*.*?\*/", "", path.read_text(encoding="utf-8"), flags=re.S)
        found = re.search(banned, code)
        assert found is None, f"{path} uses {found and found.group()}"


def test_versions_agree() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert kslserve.__version__ == project["version"]
    assert f"## {project['version']}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_abi_hash_is_the_headers() -> None:
    assert abi.header_hash(ROOT) == abi.ABI_HASH, "run `python build.py abi`"


def test_architecture_names_every_package() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    for folder in sorted(p for p in PACKAGE.iterdir() if p.is_dir() and p.name != "__pycache__"):
        assert f"{folder.name}/" in text, f"ARCHITECTURE.md lacks {folder.name}/"
    for module in sorted(PACKAGE.rglob("*.py")):
        if module.name not in ("__init__.py", "__main__.py"):
            assert module.name in text, f"ARCHITECTURE.md lacks {module.relative_to(PACKAGE)}"


def test_nothing_is_left_undone() -> None:
    marks = re.compile(
        "|".join(["TO" + "DO", "FIX" + "ME", "X" + "XX", "NotImplemented" + "Error"])
    )
    for folder in ("kslserve", "native", "tests", "bench"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in (".py", ".h", ".cc", ".inl", ".cu", ".cuh", ".md"):
                found = marks.search(path.read_text(encoding="utf-8"))
                assert found is None, f"{path.relative_to(ROOT)} has {found and found.group()}"
