"""AssistantTurn: what the 3.5 and 3.6 templates do with an assistant message, where we must do it
ourselves: inline reasoning, and a 3.5 turn that keeps its reasoning after a new question."""

from __future__ import annotations

import json
from typing import Any


def split_inline_reasoning(content: str) -> tuple[str, str] | None:
    """(reasoning, visible text) of content with a think block in it, None without one."""
    content = content.strip()
    if "</think>" not in content:
        return None
    reasoning = content.split("</think>")[0].rstrip("\n").split("<think>")[-1].lstrip("\n")
    return reasoning, content.split("</think>")[-1].lstrip("\n")


def render_turn(message: dict[str, Any]) -> str:
    """A turn's text between `<|im_start|>assistant\\n` and `<|im_end|>`, as the 3.5 template writes
    a live one: with a think block, be it empty."""
    reasoning = (message.get("reasoning_content") or "").strip()
    content = message["content"].strip()
    parts = [f"<think>\n{reasoning}\n</think>\n\n{content}"]
    for place, call in enumerate(message.get("tool_calls", ())):
        gap = "\n" if place else "\n\n" if content else ""
        function = call["function"]
        parts.append(f"{gap}<tool_call>\n<function={function['name']}>\n")
        for name, value in function["arguments"].items():
            parts.append(f"<parameter={name}>\n{_argument(value)}\n</parameter>\n")
        parts.append("</function>\n</tool_call>")
    return "".join(parts)


def _argument(value: Any) -> str:
    # The 3.5 template prints scalars as Python does: True, None.
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict | list) else str(value)
