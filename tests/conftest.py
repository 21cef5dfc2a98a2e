import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
import transformers

torch.set_num_threads(int(os.environ.get("DOMINO_TEST_THREADS", "1")))
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
