"""A service that says what is written down, request by request, and a template that knows tools."""

from __future__ import annotations

from typing import Any

import httpx
import openai

from domino_spec.serving.app import make_app
from domino_spec.serving.config import ServerConfig
from domino_spec.serving.metrics import Metrics
from tests.serving.fake import MODEL, FakeLimits, FakeService

TEMPLATE = (
    "{% if tools %}<|system|>{{ tools | tojson }}"
    'Say <tool_call>{"name": ..., "arguments": ...}</tool_call>.<|end|>{% endif %}'
    "{% for m in messages %}<|{{ m.role }}|>"
    "{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>"
    "{% endfor %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


class Scripted(FakeService):
    """Says one text after the other; the last goes on being said."""

    def __init__(self, *texts: str, template: str = TEMPLATE, **config: Any) -> None:
        super().__init__(config=ServerConfig(model=MODEL, page=False, **config))
        self.script = [*texts]
        self.tokenizer.chat_template = template
        self.limits = FakeLimits(context=4096, max_prompt_tokens=2048, max_new_tokens=2048)

    def submit(self, sequences, *, client):
        self.text = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        return super().submit(sequences, client=client)

    @property
    def prompts(self) -> list[str]:
        """What the model was asked, as text."""
        return [self.tokenizer.decode(each.prompt) for each in self.sequences]


def client_of(service: FakeService) -> openai.AsyncOpenAI:
    """The official client of this service's application."""
    app = make_app(service, metrics=Metrics())
    http = httpx.AsyncClient(transport=httpx.ASGITransport(app))
    return openai.AsyncOpenAI(
        base_url="http://127.0.0.1:8000/v1", api_key="none", http_client=http, max_retries=0
    )


def make_scripted(*texts: str, special_tokens: tuple[str, ...] = (), **how: Any) -> Scripted:
    """A scripted service; `special_tokens` are left out of text."""
    service = Scripted(*texts, **how)
    if special_tokens:
        service.tokenizer.add_tokens([*special_tokens], special_tokens=True)
    return service
