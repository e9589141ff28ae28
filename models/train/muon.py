"""Muon (Jordan 2024), an optimizer of matrices: the momentum of a matrix's gradient, made orthogonal by
a few Newton-Schulz steps.

PyTorch's own computes these products in bf16, one matrix at a time. A processor without bf16 needs five
times as long for that as in fp32, so here the products have the type that is asked for, and matrices of
one shape are multiplied together.
"""
import torch

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the odd polynomial of degree 5, as in the reference


def orthogonal(stack, n_step):
    """stack [n, rows, columns] -> the same, with all singular values of each matrix near 1"""
    tall = stack.shape[1] > stack.shape[2]
    x = stack.transpose(1, 2) if tall else stack
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    a, b, c = COEFFICIENTS
    for _ in range(n_step):
        gram = torch.bmm(x, x.transpose(1, 2))
        poly = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, poly, x, beta=a)
    return x.transpose(1, 2) if tall else x


class Muon(torch.optim.Optimizer):
    """A step is as long as AdamW's (0.2 in the mean square), so both take the same rate (Liu 2025)."""

    def __init__(self, params, lr, weight_decay=0.1, momentum=0.95, n_step=4, dtype=torch.float):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})
        self.n_step, self.dtype = n_step, dtype

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            shapes = {}
            for p in group["params"]:
                if p.grad is not None:
                    shapes.setdefault(p.shape, []).append(p)
            for shape, params in shapes.items():
                directions = torch.stack([self.direction(p, group["momentum"]) for p in params])
                directions = orthogonal(directions.to(self.dtype), self.n_step)
                for p, direction in zip(params, directions):
                    p.mul_(1 - group["lr"] * group["weight_decay"])
                    p.add_(direction, alpha=-0.2 * max(shape) ** 0.5 * group["lr"])

    def direction(self, p, momentum):
        """The gradient's mean, looked at one step ahead (Nesterov)."""
        state = self.state[p]
        if not state:
            state["momentum"] = torch.zeros_like(p)
        mean = state["momentum"].lerp_(p.grad, 1 - momentum)
        return p.grad.lerp(mean, momentum)
