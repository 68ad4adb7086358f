"""A block draft on real pools: fed rows, block passes as verify batches, and the same arithmetic said naively."""

from dataclasses import replace

import torch

from suite.kernels.attention.support import backend_class
from suite.kernels.batch import ForwardMode
from suite.models.draft_config import DraftConfig
from tests.model_rig import ModelRig, PoolMixers


class DraftMixers(PoolMixers):
    """The rig's, with the write that feeds a draft."""

    def store(self, layer, k: torch.Tensor, v: torch.Tensor) -> None:
        self.rig.allocator.pool.write(layer.index, self.attention.write_ids_of(layer.kind), k, v)


class DraftRig(ModelRig):
    """One draft on one pool. `launcher`: of the Triton backend; None for the oracle."""

    def __init__(self, draft, mode: str, launcher: str | None = None, **sizes) -> None:
        super().__init__(draft, mode, **sizes)
        if launcher is not None:
            pool = self.allocator.pool
            self.backend = backend_class("triton")(
                pool=pool, translator=self.translator, launcher=launcher, sinks=False
            )

    @torch.no_grad()
    def inject(self, features: dict[int, torch.Tensor]) -> None:
        """Feed the rows of each request's next tokens, [tokens, picks * hidden]."""
        batch = self._batch({row: [0] * len(new) for row, new in features.items()})
        mixers = DraftMixers(self, batch, self.backend.plan(batch), None, False)
        self.model.inject(torch.cat(list(features.values())), batch.positions, mixers)
        self.shuffle()

    @torch.no_grad()
    def propose(self, anchors: dict[int, int]):
        """A block pass behind each request's rows; what it stored is forgotten, not erased."""
        width = self.model.config.width
        batch = replace(self._batch({row: [0] * width for row in anchors}), mode=ForwardMode.VERIFY)
        mixers = DraftMixers(self, batch, self.backend.plan(batch), None, False)
        positions = batch.positions.view(-1, width)[:, 0]
        proposal = self.model.propose(torch.tensor(list(anchors.values())), positions, mixers)
        for row in anchors:
            self.lengths[row] -= width
            kept = -(-self.lengths[row] // self.page_size)
            self.allocator.free(self.pages[row][kept:])
            del self.pages[row][kept:]
        return proposal


def normed(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def turned(x: torch.Tensor, position: int, theta: float) -> torch.Tensor:
    """One head [dim]: pairs (i, i + dim / 2) turned by position * theta ** (-2i / dim)."""
    half = len(x) // 2
    angle = position * theta ** (-torch.arange(half, dtype=torch.float64) * 2 / len(x))
    first, second = x[:half], x[half:]
    return torch.cat((first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()))


class NaiveDraft:
    """Block drafts from their published tensors alone, fp64, request by request, head by head."""

    def __init__(self, tensors: dict[str, torch.Tensor], config: DraftConfig, embedding, output) -> None:
        self.at = {name: tensor.double() for name, tensor in tensors.items()}
        self.config, self.embedding, self.output = config, embedding.double(), output.double()

    def rows(self, layer: int, x: torch.Tensor, position: int) -> tuple[torch.Tensor, torch.Tensor]:
        config, name = self.config, f"layers.{layer}.self_attn."
        k = (self.at[name + "k_proj.weight"] @ x).view(config.kv_heads, -1)
        k = normed(k, self.at[name + "k_norm.weight"], config.norm_eps)
        turned_k = torch.stack([turned(head, position, config.rope.theta) for head in k])
        return turned_k, (self.at[name + "v_proj.weight"] @ x).view(config.kv_heads, -1)

    def propose(self, features: torch.Tensor, anchor: int):
        """features [tokens, picks * hidden] of every committed token -> ids, logits [drafts, vocab], confidence."""
        hidden = self.hidden(features, anchor)
        ids, logits, confidence, previous, state = [], [], [], anchor, None
        for index, h in enumerate(hidden):
            bias, state = self.bias(previous, h, state)
            logits.append(self.output @ h + bias)
            confidence.append(self.confident(previous, h, index))
            previous = int(logits[-1].argmax())
            ids.append(previous)
        return ids, torch.stack(logits), confidence

    def hidden(self, features: torch.Tensor, anchor: int) -> torch.Tensor:
        config, past = self.config, len(features)
        fed = [normed(self.at["fc.weight"] @ f, self.at["hidden_norm.weight"], config.norm_eps) for f in features]
        block = [anchor] + [config.mask_id] * (config.width - 1)
        x = torch.stack([self.embedding[token] for token in block])
        for layer, window in enumerate(config.windows):
            name, causal = f"layers.{layer}.", config.is_causal or window is not None
            inner = normed(x, self.at[name + "input_layernorm.weight"], config.norm_eps)
            pairs = [self.rows(layer, row, position) for position, row in enumerate([*fed, *inner])]
            out = []
            for index, row in enumerate(inner):
                here = past + index
                seen = [at for at in range(len(pairs)) if not causal or at <= here]
                seen = [at for at in seen if window is None or here - at < window]
                out.append(self.attend(layer, row, here, [pairs[at] for at in seen]))
            x = x + torch.stack(out) @ self.at[name + "self_attn.o_proj.weight"].T
            inner = normed(x, self.at[name + "post_attention_layernorm.weight"], config.norm_eps)
            gate, up = (inner @ self.at[f"{name}mlp.{each}_proj.weight"].T for each in ("gate", "up"))
            x = x + (gate * gate.sigmoid() * up) @ self.at[name + "mlp.down_proj.weight"].T
        return normed(x, self.at["norm.weight"], config.norm_eps)[config.width - config.drafts :]

    def attend(self, layer: int, row: torch.Tensor, here: int, pairs) -> torch.Tensor:
        config, name = self.config, f"layers.{layer}.self_attn."
        q = (self.at[name + "q_proj.weight"] @ row).view(config.q_heads, -1)
        q = normed(q, self.at[name + "q_norm.weight"], config.norm_eps)
        heads = []
        for head, query in enumerate(q):
            group = head // (config.q_heads // config.kv_heads)
            query = turned(query, here, config.rope.theta)
            scores = torch.stack([query @ k[group] for k, _ in pairs]) * config.head_dim**-0.5
            heads.append(scores.softmax(0) @ torch.stack([v[group] for _, v in pairs]))
        return torch.cat(heads)

    def bias(self, previous: int, h: torch.Tensor, state):
        if self.config.markov is None:
            return 0.0, None
        kind, rank = self.config.markov
        e = self.at["markov_head.markov_w1.weight"][previous]
        up = self.at["markov_head.markov_w2.weight"]
        if kind == "gated":
            gate = self.at["markov_head.gate_proj.weight"] @ torch.cat((h, e)) + self.at["markov_head.gate_proj.bias"]
            return up @ (gate.sigmoid() * e), None
        if kind == "rnn":
            state = torch.zeros(rank, dtype=torch.float64) if state is None else state
            joint = self.at["markov_head.joint_proj.weight"] @ torch.cat((state, e, h))
            g, c, o = (joint + self.at["markov_head.joint_proj.bias"]).view(3, rank)
            return up @ o.tanh(), g.sigmoid() * state + (1 - g.sigmoid()) * c.tanh()
        return up @ e, None

    def confident(self, previous: int, h: torch.Tensor, index: int):
        if not self.config.confidence:
            return None
        with_markov = self.config.markov and self.config.confidence_with_markov
        seen = torch.cat((h, self.at["markov_head.markov_w1.weight"][previous])) if with_markov else h
        score = self.at["confidence_head.proj.weight"][0] @ seen + self.at["confidence_head.proj.bias"][0]
        return float((score / (self.config.temperatures or [1.0] * self.config.drafts)[index]).sigmoid())
