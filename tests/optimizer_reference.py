"""The ten rules as others compute them, over whole parameters in one process: what ours are compared with."""

import numpy as np
import torch
from emerging_optimizers.orthogonalized_optimizers import Muon


class Lion:
    """Algorithm 2 of Chen et al. 2023."""

    def __init__(self, groups, lr, beta1, beta2):
        self.groups, self.lr, self.beta1, self.beta2 = groups, lr, beta1, beta2
        self.momenta = {}

    def step(self):
        for group in self.groups:
            for p in group["params"]:
                x, g = p.detach().numpy(), p.grad.numpy()
                m = self.momenta.get(p, np.zeros_like(x))
                update = np.sign(self.beta1 * m + (1 - self.beta1) * g) + group["weight_decay"] * x
                self.momenta[p] = self.beta2 * m + (1 - self.beta2) * g
                p.data = torch.from_numpy((x - self.lr * update).astype(np.float32))


class Lamb:
    """Algorithm 2 of You et al. 2020, in double precision."""

    def __init__(self, groups, lr, beta1, beta2, eps):
        self.groups, self.lr, self.beta1, self.beta2, self.eps = groups, lr, beta1, beta2, eps
        self.m, self.v, self.t = {}, {}, 0

    def step(self):
        self.t += 1
        for group in self.groups:
            for p in group["params"]:
                x, g = p.detach().double().numpy(), p.grad.double().numpy()
                self.m[p] = self.beta1 * self.m.get(p, 0.0) + (1 - self.beta1) * g
                self.v[p] = self.beta2 * self.v.get(p, 0.0) + (1 - self.beta2) * g * g
                m, v = self.m[p] / (1 - self.beta1**self.t), self.v[p] / (1 - self.beta2**self.t)
                r = m / (np.sqrt(v) + self.eps) + group["weight_decay"] * x
                sizes = np.linalg.norm(x), np.linalg.norm(r)
                ratio = sizes[0] / sizes[1] if all(sizes) else 1.0
                p.data = torch.from_numpy(x - self.lr * ratio * r).float()


class MuonAndAdamW:
    """Muon of emerging-optimizers over the matrices of layers, torch's AdamW over the rest."""

    def __init__(self, named, o):
        self.parts, muon, other = [], [], []
        for name, p in named.items():
            (muon if p.dim() == 2 and not name.startswith(("embedding", "output_layer")) else other).append((name, p))
        # What Megatron stores as one matrix is updated as several: views of the same memory.
        self.views = []
        for name, p in muon:
            rows = _rows(name, p)
            self.views.append([(p, r, torch.nn.Parameter(p.detach()[r].clone())) for r in rows])
        pieces = [piece for views in self.views for _, _, piece in views]
        self.muon = Muon(pieces, lr=o.lr, momentum=o.momentum, weight_decay=o.weight_decay, nesterov=True,
                         fp32_matmul_prec="highest", coefficient_type="simple", num_ns_steps=o.newton_schulz_steps,
                         scale_mode="spectral", extra_scale_factor=0.2)  # fmt: skip
        self.adamw = torch.optim.AdamW(groups_of([p for _, p in other], o.weight_decay), lr=o.lr,
                                       betas=(o.beta1, o.beta2), eps=o.eps)  # fmt: skip

    def step(self):
        for views in self.views:
            for p, rows, piece in views:
                piece.grad = p.grad[rows].clone()
        self.muon.step()
        for views in self.views:
            for p, rows, piece in views:
                p.data[rows] = piece.data
        self.adamw.step()


def _rows(name, p):
    """Four heads of eight, two key-value heads, a gated MLP: the model of the tests."""
    rows = torch.arange(p.shape[0])
    if "linear_qkv" in name:
        return [part.flatten() for part in rows.view(2, -1).split([16, 8, 8], dim=1)]
    return list(rows.chunk(2)) if "linear_fc1" in name else [rows]


def groups_of(parameters, decay):
    """Decay for matrices, none for norms and biases."""
    matrices, vectors = [p for p in parameters if p.dim() > 1], [p for p in parameters if p.dim() == 1]
    return [{"params": matrices, "weight_decay": decay}, {"params": vectors, "weight_decay": 0.0}]


def reference(named, o):
    """The reference of the rule `o.name` over parameters by name, with the constants of `o`."""
    groups, betas = groups_of(named.values(), o.weight_decay), (o.beta1, o.beta2)
    return {
        "sgd": lambda: torch.optim.SGD(groups, lr=o.lr),
        "momentum": lambda: torch.optim.SGD(groups, lr=o.lr, momentum=o.momentum),
        "rmsprop": lambda: torch.optim.RMSprop(groups, lr=o.lr, alpha=o.beta2, eps=o.eps),
        "adagrad": lambda: torch.optim.Adagrad(groups, lr=o.lr, eps=o.eps),
        "adam": lambda: torch.optim.Adam(groups, lr=o.lr, betas=betas, eps=o.eps),
        "adamw": lambda: torch.optim.AdamW(groups, lr=o.lr, betas=betas, eps=o.eps),
        "lamb": lambda: Lamb(groups, o.lr, *betas, o.eps),
        "lion": lambda: Lion(groups, o.lr, *betas),
        "adafactor": lambda: torch.optim.Adafactor(
            groups, lr=o.lr, beta2_decay=o.beta2_decay, eps=(None, o.scale_floor), d=o.update_clip
        ),
        "muon": lambda: MuonAndAdamW(named, o),
    }[o.name]()
