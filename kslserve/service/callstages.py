"""Stages of text with calls in it: free text, and a strict tool's call segment by segment."""

from __future__ import annotations

from kslserve.core.events import ToolCallEnd
from kslserve.parse.stream import OutputParser
from kslserve.service.freevalue import FreeValue
from kslserve.service.stage import Owner, Stage, refused
from kslserve.service.toolgrammar import KEY_OPEN, NAME_OPEN, TAG_END, ToolGrammar, name_grammar
from kslserve.text.detokenizer import Detokenizer


def called(owner: Owner) -> Stage:
    """After a `<tool_call>` that begins a call."""
    return Name(owner, opened=False) if owner.rules.names_held else Text(owner)


def in_call(owner: Owner, name: str, rest: str = "\n") -> Stage:
    """After the head of a call. rest: what followed its `>`."""
    tool = owner.rules.strict.get(name)
    if tool is not None:
        return _body_after(owner, tool, set(), rest)
    return _LooseCall(owner, name) if owner.rules.names_held else Text(owner)


def _body_after(owner: Owner, tool: ToolGrammar, given: set[str], rest: str) -> Stage:
    """The body of a call, behind text that was sampled without a look at its grammar."""
    return _Body(owner, tool, given, lead=not rest, behind=rest.lstrip())


class Text(Stage):
    """Free text between calls. not_empty: the turn may not end before there is some."""

    def __init__(self, owner: Owner, *, not_empty: bool = False) -> None:
        self._owner = owner
        if not_empty:
            self.constant = owner.kit.not_empty

    def take(self, token: int) -> Stage:
        kit = self._owner.kit
        if token == kit.call_open and self._owner.rules.tools:
            return called(self._owner)
        if self.constant is not None and kit.tokenizer.token_bytes(token).strip():
            self.constant = None
        return self


class _Segment(Stage):
    """A part of a call with a grammar that says where it ends. behind: text of it that was sampled
    without a look at the grammar."""

    held = True

    def __init__(self, owner: Owner, grammar: str, behind: str = "") -> None:
        self._owner = owner
        self._grammar = grammar
        self._behind = behind
        self._bytes = b""

    def open(self) -> Stage:
        if self.matcher is not None:
            return self
        self.matcher = self._owner.kit.grammars.matcher(self._grammar)
        stage: Stage = self
        for token in self._owner.kit.grammars.ids(self._behind) if self._behind else ():
            stage = stage.open()
            if stage.matcher is not None and not stage.matcher.validate_tokens([token]):
                return Stage()  # it does not fit
            stage = stage.take(token)
        return stage

    def take(self, token: int) -> Stage:
        stage = self.open()
        if stage is not self:
            return stage.take(token)
        assert self.matcher is not None
        if not self.matcher.consume_token(token):
            return refused(self._owner, self.matcher, token)
        self._bytes += self._owner.kit.tokenizer.token_bytes(token)
        return self._next() if self.matcher.is_stopped() or self._over() else self

    def _over(self) -> bool:
        """It is complete, although its grammar lets it go on."""
        return False

    def _next(self) -> Stage:
        """The stage after it."""
        raise AssertionError


class Name(_Segment):
    """The name of the tool."""

    def __init__(self, owner: Owner, *, opened: bool) -> None:
        super().__init__(owner, name_grammar(owner.rules.tools, opened=opened))

    def _next(self) -> Stage:
        name = self._bytes.decode().removeprefix(NAME_OPEN).removesuffix(TAG_END)
        return in_call(self._owner, name)


class _Body(_Segment):
    """Between values: a key or the end."""

    def __init__(
        self, owner: Owner, tool: ToolGrammar, given: set[str], *, lead: bool, behind: str = ""
    ) -> None:
        super().__init__(owner, tool.body(given, lead=lead), behind)
        self._tool = tool
        self._given = given

    def _over(self) -> bool:
        text = self._bytes.lstrip(b"\n")
        return text.startswith(KEY_OPEN.encode()) and TAG_END.encode() in text

    def _next(self) -> Stage:
        text = self._bytes.decode().lstrip("\n")
        if not text.startswith(KEY_OPEN):
            return Text(self._owner)
        key, _, rest = text.removeprefix(KEY_OPEN).partition(TAG_END)
        grammar = self._tool.value(key)
        if grammar is None:
            return _FreeText(self._owner, self._tool, key, self._given, rest)
        return _Value(self._owner, grammar, self._tool, self._given | {key})


class _Value(_Segment):
    """A typed value and its closing tag."""

    def __init__(self, owner: Owner, grammar: str, tool: ToolGrammar, given: set[str]) -> None:
        super().__init__(owner, grammar)
        self._tool = tool
        self._given = given

    def _next(self) -> Stage:
        return _Body(self._owner, self._tool, self._given, lead=False)


class _FreeText(Stage):
    """A string value without a rule: anything but the end of the turn."""

    def __init__(
        self, owner: Owner, tool: ToolGrammar, key: str, given: set[str], start: str
    ) -> None:
        self._owner = owner
        self._tool = tool
        self._given = given | {key}
        self._value = FreeValue(tool.shape, key, frozenset(given))
        self._value.feed(start)
        self._texts = Detokenizer(owner.kit.tokenizer)
        self.constant = owner.kit.no_end

    def take(self, token: int) -> Stage:
        rest = self._value.feed(self._texts.feed((token,)))
        if rest is None:
            return self
        return _body_after(self._owner, self._tool, self._given, rest)


class _LooseCall(Stage):
    """A call of a tool that is not strict, while names are held: the parser says where it ends."""

    def __init__(self, owner: Owner, name: str) -> None:
        self._owner = owner
        tools = [owner.rules.tools[name]]
        self._parser = OutputParser(tools, thinking=False, make_id=str)
        self._parser.feed(f"<tool_call>{NAME_OPEN}{name}{TAG_END}")
        self._texts = Detokenizer(owner.kit.tokenizer)

    def take(self, token: int) -> Stage:
        events = self._parser.feed(self._texts.feed((token,)))
        if any(isinstance(event, ToolCallEnd) for event in events):
            return Text(self._owner)
        return self
