"""A llama.cpp that counts: as the package llama_cpp, and as llama-server (run as a program)."""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import ModuleType

SIZE = 64
PROMPT_MS, DECODING_MS = 250.0, 1500.0
DRAFTS_TAKEN = 3


def counted(tokens, count):
    return [(tokens[-1] + 1 + i) % SIZE for i in range(count)]


# The package ------------------------------------------------------------------------------------


def package(monkeypatch, *, offloads=False):
    """Install the fake; its `Llama.opened` remembers every model that was opened."""

    class Llama:
        opened = []

        def __init__(self, **options):
            self.options, self.prompts, self.closed, self.cached = options, [], False, False
            self.opened.append(self)

        def reset(self):
            self.cached = False

        def generate(self, tokens, *, temp, repeat_penalty, reset):
            assert (temp, repeat_penalty, reset) == (0.0, 1.0, False)
            assert not self.cached, "the prompt would be found in the cache"
            self.cached = True
            self.prompts.append(list(tokens))
            draft = self.options.get("draft_model")
            last = tokens[-1]
            while True:
                taken = 1 if draft is None else 1 + len(draft(tokens))
                for _ in range(taken):
                    last = (last + 1) % SIZE
                    yield last

        def tokenize(self, text, *, add_bos, special):
            assert (add_bos, special) == (False, True)
            return [len(text)]

        def close(self):
            self.closed = True

    class LlamaPromptLookupDecoding:
        def __init__(self, *, max_ngram_size, num_pred_tokens):
            self.depth = num_pred_tokens

        def __call__(self, input_ids):
            return [0] * self.depth

    module, speculative = ModuleType("llama_cpp"), ModuleType("llama_cpp.llama_speculative")
    module.Llama, module.__version__ = Llama, "9.9"
    module.llama_supports_gpu_offload = lambda: offloads
    module.llama_print_system_info = lambda: b"CPU : SSE3 = 1 | AVX512 = 0 | AVX2 = 1 | "
    speculative.LlamaPromptLookupDecoding = LlamaPromptLookupDecoding
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(sys.modules, speculative.__name__, speculative)
    return Llama


def no_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "llama_cpp", None)  # importing it fails


# The server -------------------------------------------------------------------------------------


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, port=0, *, model="tiny.gguf", context=4096, extra_prompt_tokens=0):
        super().__init__(("127.0.0.1", port), _Handler)
        self.model, self.context, self.bodies = model, context, []
        self.extra_prompt_tokens = extra_prompt_tokens
        self.url = f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self):
        settings = {"n_ctx": self.server.context}
        self._say({
            "status": "ok", "model_path": f"/models/{self.server.model}", "build_info": "b9-fake",
            "default_generation_settings": settings,
        })  # fmt: skip

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append(body)
        if self.path == "/tokenize":
            self._say({"tokens": [int(word) for word in body["content"].split()]})
            return
        count = min(body["n_predict"], self.server.context - len(body["prompt"]))
        times = {
            "prompt_n": len(body["prompt"]) + self.server.extra_prompt_tokens,
            "prompt_ms": PROMPT_MS, "predicted_n": count, "predicted_ms": DECODING_MS,
            "draft_n": 2 * DRAFTS_TAKEN, "draft_n_accepted": DRAFTS_TAKEN,
        }  # fmt: skip
        self._say({"tokens": counted(body["prompt"], count), "timings": times})

    def _say(self, values):
        data = json.dumps(values).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


@contextmanager
def serving(**options):
    with Server(**options) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def program(folder):
    """An executable llama-server, which writes down how it was called."""
    path = folder / "llama-server"
    path.write_text(f"#!{sys.executable} -SE\nexec(open({__file__!r}).read())\n")
    path.chmod(0o755)
    return path


if __name__ == "__main__":
    if sys.argv[1:] == ["--version"]:
        print("version: 7 (fake)", file=sys.stderr)
        sys.exit()
    if sys.argv[1:] == ["--list-devices"]:
        print("Available devices:\n  (none)")
        sys.exit()
    parser = argparse.ArgumentParser()
    for option in ("model", "host", "ctx-size", "parallel", "threads", "threads-batch", "device"):
        parser.add_argument(f"--{option}")
    parser.add_argument("--port", type=int)
    given = parser.parse_args()
    if "broken" in given.model:
        sys.exit("error: unknown model architecture")
    with open(given.model + ".called", "w") as called:  # noqa: PTH123 - starts fast
        json.dump({"words": sys.argv[1:], "pid": os.getpid(), "environ": dict(os.environ)}, called)
    Server(given.port, model=os.path.basename(given.model)).serve_forever()  # noqa: PTH119
