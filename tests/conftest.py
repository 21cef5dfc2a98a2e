import importlib.util
import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
import transformers

# Kernels are tested in Triton's interpreter, which must be chosen before anything imports Triton;
# in the engines' environments Triton is theirs.
if not torch.cuda.is_available() and importlib.util.find_spec("vllm") is None:
    os.environ["TRITON_INTERPRET"] = "1"

torch.set_num_threads(int(os.environ.get("DOMINO_TEST_THREADS", "1")))
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
