"""kslserve: a local LLM server for agentic coding clients."""

__version__ = "0.1.0"
