"""Domino as a decoding method of Transformers: `model.generate(..., custom_generate=...)`."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.generation.utils import GenerateDecoderOnlyOutput

from domino_spec.api.decoder import DominoDecoder
from domino_spec.api.prompts import check_prompt
from domino_spec.decoding import Drafter, RunStats, SamplingParams, make_sampler
from domino_spec.decoding import Sequence as Decoded
from domino_spec.decoding.processors import criteria_for_sequence, for_sequence, split_warpers
from domino_spec.decoding.stopping import at_criteria
from domino_spec.errors import InputError
from domino_spec.targets.support import image_unsupported_reason

RECIPE = str(Path(__file__).parent / "recipe")
"""A folder for `custom_generate=`, with `trust_remote_code=True` and `draft=...`."""

_IGNORED = frozenset(
    {"attention_mask", "position_ids", "use_cache", "logits_to_keep", "cache_position"}
)
_IMAGES = frozenset({
    "mm_encoder_outputs", "pixel_values", "pixel_values_videos", "image_grid_thw", "video_grid_thw",
    "token_type_ids", "mm_token_type_ids",
})  # fmt: skip
"""What a vision-language target is given; without pictures it is empty, or zeros."""


class DominoGenerate:
    """A decoding method: `model.generate(..., custom_generate=DominoGenerate(draft))`.

    Generation config, logits processors, stopping criteria and streamers work as they do
    without it. `stats` holds the counts of the last call.
    """

    def __init__(
        self,
        draft: Drafter | nn.Module | DominoDecoder | str | Path,
        *,
        depth: int | None = None,
        candidates: int | None = None,
        shift_label: bool | None = None,
    ) -> None:
        if not isinstance(draft, (Drafter, nn.Module, DominoDecoder, str, Path)):
            raise InputError(
                f"the draft is {type(draft).__name__}; expected a name such as 'lookup', a folder "
                "or hub id, a drafter, its model or a DominoDecoder."
            )
        if isinstance(draft, DominoDecoder) and (depth, candidates) != (None, None):
            raise InputError("depth and candidates are the decoder's own; set them there.")
        if shift_label is not None and not isinstance(draft, (str, Path)):
            raise InputError("shift_label is for a checkpoint; a loaded drafter already has it.")
        self._draft = draft
        self._depth = depth
        self._candidates = candidates
        self._shift_label = shift_label
        self._decoder = draft if isinstance(draft, DominoDecoder) else None
        self.stats = RunStats()

    def __call__(
        self,
        model: Any,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        streamer: Any | None = None,
        synced_gpus: bool = False,
        **model_kwargs: Any,
    ) -> Tensor | GenerateDecoderOnlyOutput:
        """Called by `generate` in place of its own sampling loop."""
        # Transformers does not hand its streamer to a callable; the caller's frame has it.
        streamer = streamer if streamer is not None else _callers_streamer()
        count = input_ids.shape[0]
        if image_unsupported_reason(model) is None:
            model_kwargs = _text_alone(model_kwargs)
        _refuse(generation_config, model_kwargs, synced_gpus, count=count)
        if streamer is not None and count > 1:
            raise InputError(
                f"a streamer takes one sequence, found {count}: those of a batch advance "
                "by different numbers of tokens."
            )
        decoder = self._decoder_for(model)
        self.stats = RunStats()
        sequences = _sequences(
            decoder,
            input_ids,
            model_kwargs.get("attention_mask"),
            logits_processor,
            stopping_criteria,
            generation_config,
            self.stats,
        )
        for commit in decoder.run(sequences, self.stats):
            if streamer is not None:
                for token in commit.tokens:
                    streamer.put(torch.tensor([token]))
        if streamer is not None:
            streamer.end()
        return _output(sequences, input_ids, generation_config)

    def _decoder_for(self, model: Any) -> DominoDecoder:
        decoder = self._decoder
        if decoder is None:
            assert not isinstance(self._draft, DominoDecoder)
            decoder = self._decoder = DominoDecoder(
                model,
                self._draft,
                shift_label=self._shift_label,
                depth=self._depth,
                candidates=self._candidates,
            )
        if decoder.target.model is not model:
            raise InputError(
                "this DominoGenerate was made for another model object; make one for each target."
            )
        return decoder


def generate_with_recipe(model: Any, draft: Any, **arguments: Any) -> Any:
    """`generate` through the recipe folder: hands on what a bare callable is not given.

    Transformers passes a callable neither the tokenizer that stop strings need nor the streamer.
    """
    if draft is None:
        raise InputError(
            "the recipe needs a drafter: model.generate(..., draft='lookup'), or a folder, a hub "
            "id, a drafter or a decoder."
        )
    method = draft if isinstance(draft, DominoGenerate) else DominoGenerate(draft)
    tokenizer = arguments.pop("tokenizer", None)
    own = model.generation_config.stop_strings
    config = arguments.get("generation_config")
    stops = arguments.pop("stop_strings", None) or (config and config.stop_strings) or own
    if not stops:
        return model.generate(custom_generate=method, **arguments)
    if tokenizer is None:
        raise InputError("stop_strings need tokenizer=... as well.")
    criteria = StoppingCriteriaList(arguments.pop("stopping_criteria", None) or [])
    criteria.append(StopStringCriteria(tokenizer, stops))
    if config is not None:
        config = arguments["generation_config"] = copy.deepcopy(config)
        config.stop_strings = None
    try:
        # A field left out of the call's config is filled from the model's own.
        model.generation_config.stop_strings = None
        return model.generate(custom_generate=method, stopping_criteria=criteria, **arguments)
    finally:
        model.generation_config.stop_strings = own


def _callers_streamer() -> Any | None:
    frame = sys._getframe(2)
    return frame.f_locals.get("streamer") if frame.f_code.co_name == "generate" else None


def _text_alone(model_kwargs: dict[str, Any]) -> dict[str, Any]:
    """Without what a vision-language target's text has too and needs not; images are refused."""
    given = {name: value for name, value in model_kwargs.items() if name in _IMAGES}
    images = sorted(
        name
        for name, value in given.items()
        if value is not None and (bool(value.any()) if isinstance(value, Tensor) else value)
    )
    if images:
        raise InputError(
            f"the prompt holds images (found {', '.join(images)}), with which this method does not "
            "prefill a vision-language target. Use DominoDecoder(model, draft, tokenizer, "
            'processor=processor).generate(messages), with parts {"type": "image", "image": ...}.'
        )
    return {name: value for name, value in model_kwargs.items() if name not in given}


def _refuse(
    config: GenerationConfig, model_kwargs: dict[str, Any], synced_gpus: bool, *, count: int
) -> None:
    if (config.num_beams or 1) != 1:
        raise InputError(
            f"num_beams is {config.num_beams}; speculative decoding verifies one continuation of "
            "a prompt, so beams are not possible. Use num_beams=1."
        )
    other = [name for name in ("penalty_alpha", "dola_layers") if getattr(config, name, None)]
    if other:
        raise InputError(f"{', '.join(other)} asks for another decoding method; leave it out.")
    if config.cache_implementation == "quantized":
        raise InputError(
            "cache_implementation='quantized' changes the target's own output and is not supported."
        )
    if synced_gpus:
        raise InputError("synced_gpus (ZeRO-3 or FSDP generation) is not supported.")
    if config.output_attentions or config.output_hidden_states:
        raise InputError(
            "output_attentions and output_hidden_states are not supported: blocks hold rejected "
            "positions too. Run the finished sequence through the model once instead."
        )
    if count > 1 and (config.output_scores or config.output_logits):
        raise InputError(
            "output_scores and output_logits are given for one sequence at a time; those of a "
            "batch advance at different speeds."
        )
    cache = model_kwargs.pop("past_key_values", None)
    if cache is not None and cache.get_seq_length() > 0:
        raise InputError(
            "continuing a filled past_key_values is not supported: the drafter needs the captured "
            "states of those tokens. Pass the whole prompt."
        )
    if not _usual_positions(model_kwargs.get("position_ids"), model_kwargs.get("attention_mask")):
        raise InputError(
            "position_ids differ from those that the attention mask gives; leave them out."
        )
    unknown = sorted(k for k, v in model_kwargs.items() if v is not None and k not in _IGNORED)
    if unknown:
        raise InputError(f"Domino decodes from input_ids alone; found {', '.join(unknown)}.")


def _usual_positions(positions: Tensor | None, mask: Tensor | None) -> bool:
    """Whether positions count the prompt's tokens from 0, as `generate` makes them itself.

    Those of M-RoPE are [axes, batch, tokens], and alike for text.
    """
    if positions is None:
        return True
    if positions.dim() not in (2, 3):
        return False
    if mask is None:
        usual = torch.arange(positions.shape[-1], device=positions.device)
        return bool((positions == usual).all())
    mask = mask.to(positions.device).bool()
    usual = mask.long().cumsum(-1) - 1
    return bool((positions == usual)[..., mask].all())


def _sequences(
    decoder: DominoDecoder,
    input_ids: Tensor,
    attention_mask: Tensor | None,
    processors: LogitsProcessorList,
    criteria: StoppingCriteriaList,
    config: GenerationConfig,
    run: RunStats,
) -> list[Decoded]:
    count, width = input_ids.shape
    max_new_tokens = int(config.max_length) - width
    sequences = []
    for index in range(count):
        seen = input_ids[index].tolist()
        prompt = seen
        if attention_mask is not None:
            prompt = input_ids[index][attention_mask[index].bool().to(input_ids.device)].tolist()
        # Transformers itself warns about its context; only what would not be exact is refused.
        static = decoder.target.static_rope_limit is not None
        check_prompt(prompt, max_new_tokens if static else 0, decoder.target)
        own, sampling = list(for_sequence(processors, index, count)), {}
        if config.do_sample:
            own, found = split_warpers(own)
            # Torch's generator is the seed, and calls that share it must agree.
            sampling = {"temperature": 1.0, "accept": "coupled", **found}
        sequence = Decoded(
            prompt,
            SamplingParams(max_new_tokens=max_new_tokens, processors=tuple(own), **sampling),
            index=index,
            stop_rules=[at_criteria(criteria_for_sequence(criteria, count), decoder.target.device)],
            run=run,
            seen_prompt=seen,
        )
        if config.output_scores or config.output_logits:
            sequence.sampler = make_sampler(sequence, keep_scores=True)
        sequences.append(sequence)
    return sequences


def _output(
    decoded: list[Decoded], input_ids: Tensor, config: GenerationConfig
) -> Tensor | GenerateDecoderOnlyOutput:
    longest = max(len(each.output) for each in decoded)
    pad = config._pad_token_tensor
    answers = torch.full((len(decoded), longest), 0 if pad is None else int(pad))
    for index, each in enumerate(decoded):
        answers[index, : len(each.output)] = torch.tensor(each.output)
    sequences = torch.cat((input_ids, answers.to(input_ids.device)), dim=1)
    if not config.return_dict_in_generate:
        return sequences
    sampler = decoded[0].sampler
    scores = logits = None
    if sampler is not None and config.output_scores:
        scores = tuple(score.unsqueeze(0) for score in sampler.scores or ())
    if sampler is not None and config.output_logits:
        logits = tuple(each.unsqueeze(0) for each in sampler.logits or ())
    return GenerateDecoderOnlyOutput(sequences=sequences, scores=scores, logits=logits)
