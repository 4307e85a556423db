"""Hugging Face `generate` by this project's acceptance rules: a decoding loop that is handed to it.

    ids = model.generate(**inputs, custom_generate=Speculative(draft, accept="elastic"))

`generate` prepares settings, logits processors, stopping criteria and the cache as it always does,
and leaves the loop to the callable. A turn of this one is classic speculative decoding, since both
models are in this process:

    draft W tokens ──► one pass of the model over them ──► judge one after the other, until one
          ▲            fails, the text ends, or all stand and the model adds a token of its own
          └──── cut both caches to the text less its last token ◄────┘

Rules, credit, sketches of q and keyed noise are those of a cloud's session (`session/judge`).

The processors make p' of p and q' of q. Those that are functions of ids and scores run on both
models. The others, any that isn't the library's own among them, run on the target alone: once a
position, in order, as if there were no draft.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import transformers
from transformers.generation import GenerateDecoderOnlyOutput, LogitsProcessorList

from e2sci.decoding.acceptance import Judgement, Measure, RuleName
from e2sci.decoding.credit import Credit, CreditParams
from e2sci.decoding.distribution import Dense, Processed, decode
from e2sci.decoding.predictor import Predictor
from e2sci.decoding.sampling import History, SamplingParams, adjusted
from e2sci.integrations.huggingface_calls import bears_drafting, obstacle, unshared
from e2sci.runtime.options import Options
from e2sci.session.judge import Draft, Judge
from e2sci.session.messages import Judged, Open


@dataclass
class Figures:
    """How the latest text came about.

    `seed`: of the noise, None when greedy. Of the draft tokens, `judged` leaves out those behind a
    rejection; `accepted` stand, `tolerated` of these against the target's own pick. `passes`: of
    the target, the prompt's included. `credit` in [0, 1] and `threshold` in nats: at the end, None
    under lossless rules. `trace`: every judgement, if asked for.
    """

    seed: int | None = None
    tokens: int = 0
    drafted: int = 0
    judged: int = 0
    accepted: int = 0
    tolerated: int = 0
    passes: int = 0
    credit: float | None = None
    threshold: float | None = None
    trace: list[Judged] = field(default_factory=list)

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted of all judged draft tokens, in [0, 1]; None if none was judged."""
        return self.accepted / self.judged if self.judged else None


class Speculative:
    """What `generate` takes as `custom_generate`: speculative decoding with the model `draft`.

    `draft`: a causal language model whose token ids mean the same as those of the model that
    generates; it may have fewer or more of them at the end (padding). `accept` and all others are
    as in `Options`, but for `predictor`: g_θ of elastic, None for ω = 1. Raises ValueError on
    settings that contradict each other.

    In the call to `generate`, `seed` (0 to 2⁶³ - 1) makes a sampled text repeatable; by default
    it is drawn from torch's generator. `stream_to` takes a streamer, since `generate` hands its
    own argument `streamer` to no callable. The call raises ValueError, before any text, if it asks
    for what can't be done: several sequences, beams, padding, a cache that can't be cut.

    `figures`: of the latest text. One text at a time.
    """

    def __init__(
        self,
        draft: Any,
        *,
        accept: RuleName = "strict",
        measure: Measure = "js",
        threshold: float | None = None,
        budget: float | None = None,
        floor: float = 0.0,
        agreement: bool | None = None,
        constants: CreditParams | None = None,
        predictor: Predictor | None = None,
        window: int | None = None,
        trace: bool = False,
    ) -> None:
        if not isinstance(getattr(draft, "config", None), transformers.PreTrainedConfig):
            raise ValueError(
                f"the draft is of type {type(draft).__name__}; expected a loaded model, as "
                "AutoModelForCausalLM.from_pretrained returns it"
            )
        self.options = Options(
            mode="sync",
            accept=accept,
            measure=measure,
            threshold=threshold,
            budget=budget,
            floor=floor,
            agreement=agreement,
            constants=constants,
            window=window,
            trace=trace,
        )
        self.draft = draft
        self.predictor = predictor
        self.figures = Figures()

    def __call__(
        self,
        model: Any,
        input_ids: torch.Tensor,
        *,
        logits_processor: LogitsProcessorList,
        stopping_criteria: Any,
        generation_config: Any,
        seed: int | None = None,
        stream_to: Any = None,
        **model_kwargs: Any,
    ) -> Any:
        """As `generate` calls it; what `generate` is to return."""
        if reason := obstacle(model, self.draft, input_ids, generation_config, model_kwargs):
            raise ValueError(f"no speculative decoding here: {reason}")
        sampling = SamplingParams()
        if generation_config.do_sample:  # temperature and filters are among the processors
            seed = int(torch.randint(1 << 62, ())) if seed is None else seed
            sampling = SamplingParams(temperature=1, seed=seed)
        opening = Open(
            request=0,
            prompt=b"",
            max_tokens=1,
            sampling=sampling,
            rule=self.options.rule,
            credit=self.options.credit,
            trace=self.options.trace,
        )
        judge = Judge(opening, _vocab(model), partial(Credit, predictor=self.predictor))
        shared = LogitsProcessorList(p for p in logits_processor if bears_drafting(p))
        if len(shared) < len(logits_processor) and not judge.rule.lossless:
            raise ValueError(unshared(logits_processor, self.options.accept))
        self.figures = Figures(seed=seed if generation_config.do_sample else None)
        text = _Text(
            input_ids,
            _Model("model", model, model_kwargs["cache"], logits_processor),
            _Model("draft", self.draft, _cache(self.draft), shared),
            judge,
            sampling,
            self.figures,
            window=self.options.window_size,
            config=generation_config,
        )
        if stream_to is not None:
            stream_to.put(input_ids.cpu())
        for token in text.tokens(stopping_criteria):
            if stream_to is not None:
                stream_to.put(torch.tensor([token]))
        if stream_to is not None:
            stream_to.end()
        return text.result()


class _Model:
    """A model, the cache with the beginning of the text, and the processors of what it says."""

    def __init__(self, role: str, model: Any, cache: Any, processors: LogitsProcessorList) -> None:
        self.role, self.cache, self.processors = role, cache, processors
        self.vocab = _vocab(model)
        self._model = model
        self._selective = "logits_to_keep" in inspect.signature(model.forward).parameters
        cache.activate_past_recording()

    def unread(self, ids: torch.Tensor) -> torch.Tensor:
        return ids[:, int(self.cache.get_seq_length()) :]

    def read(self, ids: torch.Tensor, outputs: int) -> torch.Tensor:
        """The logits behind each of the last `outputs` of `ids`: (outputs, vocabulary), float32.
        Raises ValueError if the cache turns out to be one that can't be cut."""
        made = self._model(
            input_ids=self.unread(ids).to(self._model.device),
            cache=self.cache,
            use_cache=True,
            **({"logits_to_keep": outputs} if self._selective else {}),
        )
        if not self.cache.is_croppable:
            raise ValueError(
                f"no speculative decoding here: the {self.role}'s cache can't be cut back "
                f"({self._model.config.model_type}: a recurrent state, or a quantised or full "
                "sliding cache); use another model, or another cache_implementation"
            )
        return made.logits[0, -outputs:].float().to(ids.device)

    def distribution(self, logits: torch.Tensor, ids: torch.Tensor) -> Dense:
        """Of the token behind `ids`, from one row of logits."""
        raw = logits.cpu().numpy()
        if not self.processors:
            return Dense(raw)
        after = self.processors(ids, logits[None].clone())
        return Processed(raw, Dense(after[0].cpu().numpy()))

    def cut(self, length: int) -> None:
        """Keep `length` tokens at most."""
        self.cache.crop(-max(0, int(self.cache.get_seq_length()) - length))


class _Text:
    """One text as it is written. `ids`: (1, n), prompt and output, all of it final."""

    def __init__(
        self,
        ids: torch.Tensor,
        target: _Model,
        draft: _Model,
        judge: Judge,
        sampling: SamplingParams,
        figures: Figures,
        *,
        window: int,
        config: Any,
    ) -> None:
        self.ids = ids
        self._line = History(ids[0].tolist())  # ids, and the drafts while they are made
        self._target, self._draft, self._judge = target, draft, judge
        self._sampling, self._figures = sampling, figures
        self._size, self._window = window, window
        self._config = config
        ends = config.eos_token_id
        self._ends = set(ends if isinstance(ends, list) else [ends])
        wanted = config.return_dict_in_generate
        self._scores: tuple[Any, ...] | None = () if wanted and config.output_scores else None
        self._logits: tuple[Any, ...] | None = () if wanted and config.output_logits else None

    def tokens(self, stopping: Any) -> Iterator[int]:
        """Each token as it becomes final, until `stopping` says that it was the last."""
        ended = False
        while not ended:
            for token in self._turn():
                yield token
                ended = bool(stopping(self.ids, self._scores).all())
                if ended:
                    break
            self._close_turn()

    def result(self) -> Any:
        """What the settings want of `generate`."""
        if not self._config.return_dict_in_generate:
            return self.ids
        return GenerateDecoderOnlyOutput(
            sequences=self.ids,
            scores=self._scores,
            logits=self._logits,
            cache=self._target.cache,
        )

    def _turn(self) -> Iterator[int]:
        """What becomes of a window, and the target's own token behind it if all of it stands."""
        drafts = self._drafts()
        rows = self._target.read(self._followed_by(drafts), len(drafts) + 1)
        self._figures.passes += 1
        for draft, row in zip(drafts, rows, strict=False):  # one row more than drafts
            p = self._target.distribution(row, self.ids)
            outcome = self._judge.judge(draft, p, self._line, self._figures.passes)
            self._count(outcome)
            yield self._commit(outcome.token, p)
            if not outcome.accepted:
                return
        p = self._target.distribution(rows[-1], self.ids)
        yield self._commit(self._judge.pick(p, self._line), p)

    def _drafts(self) -> list[Draft]:
        """Up to W proposals; fewer before the end, or behind an id that the draft doesn't know."""
        drafts: list[Draft] = []
        room = self._config.max_length - len(self._line) - 1
        for _ in range(min(self._window, room)):
            ids = self._followed_by(drafts)
            if int(self._draft.unread(ids).max()) >= self._draft.vocab:
                break
            row = _fitted(self._draft.read(ids, 1)[0], self._target.vocab)
            drafts.append(self._proposed(self._draft.distribution(row, ids)))
            if drafts[-1].token in self._ends:
                break
        self._line.truncate(self.ids.shape[1])
        self._figures.drafted += len(drafts)
        return drafts

    def _proposed(self, q: Dense) -> Draft:
        rule = self._judge.rule
        made = rule.propose(q, self._sampling, self._line, with_sketch=rule.needs_sketch)
        self._line.append(made.token)
        return Draft(made.token, decode(made.sketch, q.size) if made.sketch else None)

    def _followed_by(self, drafts: list[Draft]) -> torch.Tensor:
        return torch.cat([self.ids, self.ids.new_tensor([[d.token for d in drafts]])], dim=-1)

    def _commit(self, token: int, p: Dense) -> int:
        if self._scores is not None:
            after = adjusted(p, self._sampling, self._line)
            assert isinstance(after, Dense)
            self._scores += (torch.from_numpy(after.logits)[None].to(self.ids.device),)
        if self._logits is not None:
            self._logits += (torch.from_numpy(p.logits)[None].to(self.ids.device),)
        self._line.append(token)
        self.ids = torch.cat([self.ids, self.ids.new_tensor([[token]])], dim=-1)
        self._figures.tokens += 1
        return token

    def _count(self, outcome: Judgement) -> None:
        self._figures.judged += 1
        self._figures.accepted += outcome.accepted
        self._figures.tolerated += outcome.accepted and not outcome.agreed

    def _close_turn(self) -> None:
        for model in (self._target, self._draft):
            model.cut(self.ids.shape[1] - 1)
        report = self._judge.report()
        self._figures.trace += report.trace
        if report.credit is not None:
            self._figures.credit = report.credit.credit
            self._figures.threshold = report.credit.threshold
            self._window = report.credit.window or self._size


def _vocab(model: Any) -> int:
    return int(model.config.get_text_config().vocab_size)


def _cache(draft: Any) -> Any:
    return transformers.DynamicCache(config=draft.config.get_text_config(decoder=True))


def _fitted(logits: torch.Tensor, size: int) -> torch.Tensor:
    """`logits` over `size` ids: padding cut off, or ids that are not there made impossible."""
    lacking = max(0, size - logits.shape[0])
    return torch.nn.functional.pad(logits[:size], (0, lacking), value=-torch.inf)
