"""A random walk over what loops do with a model: forwards, backwards, writes to weights, `frozen`, copies, steps.

After each forward the model's outputs, gradients and histories are held against those of a deep copy that was made just
before it and has kept nothing.
"""

import contextlib
import copy
import pickle
import random
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn

import quaver.torch as qt
from quaver.torch.state.layer_state import state_of
from tests.close import assert_bitwise

N, K, T = 48, 32, 5


class Tied(nn.Module):
    """An embedding that shares its weight with the head, and two layers with one weight."""

    def __init__(self, recipe: str) -> None:
        super().__init__()
        self.table = nn.Embedding(N, K)
        self.one, self.two = qt.Linear(K, K, recipe=recipe), qt.Linear(K, K, bias=False, recipe=recipe)
        self.head = qt.Linear(K, N, bias=False, recipe=recipe)
        self.head.weight, self.two.weight = self.table.weight, self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.two(self.one(x + self.table.weight[: x.shape[-2]]).relu()))
        return y


class Adapted(nn.Module):
    """A frozen base layer and a trainable adapter."""

    def __init__(self, recipe: str) -> None:
        super().__init__()
        self.base = qt.Linear(K, N, recipe=recipe).requires_grad_(False)
        self.down, self.up = qt.Linear(K, 16, bias=False, recipe=recipe), nn.Linear(16, N, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base(x) + self.up(self.down(x))
        return y


def stored(recipe: str) -> nn.Module:
    codes = "mxfp8" if recipe == "mxfp6" else recipe
    with qt.quantized_init(codes):
        base = qt.Linear(K, K, recipe=recipe).requires_grad_(False)
    return nn.Sequential(base, nn.ReLU(), qt.Linear(K, N, recipe=recipe))


def in_high_precision(p: Tensor) -> bool:
    """Return True for parameters that are not stored in eight bits."""
    return p.dtype is torch.float32 and not isinstance(p, qt.QuantizedTensor)


def normed(recipe: str) -> nn.Module:
    return nn.Sequential(nn.utils.parametrizations.weight_norm(qt.Linear(K, N, recipe=recipe)))


MODELS: dict[str, Callable[[str], nn.Module]] = {
    "Linear": lambda r: nn.Sequential(qt.Linear(K, N, recipe=r), nn.ReLU(), qt.Linear(N, K, recipe=r)),
    "tied": Tied,
    "adapted": Adapted,
    "stored": stored,
    "weight_norm": normed,
    "LayerNormLinear": lambda r: qt.LayerNormLinear(K, N, recipe=r),
    "MLP": lambda r: qt.MLP(K, N, "swiglu", fused=False, recipe=r),
    "MLP that recomputes": lambda r: qt.MLP(K, N, recompute=True, recipe=r),
    "TransformerLayer": lambda r: qt.TransformerLayer(K, 2, N, recipe=r),
}


class Walk:
    """A model, its optimizers, and a random sequence of actions chosen by a seed."""

    def __init__(self, kind: str, recipe: str, seed: int) -> None:
        self.random, self.recipe = random.Random(f"{kind} {recipe} {seed}"), recipe
        torch.manual_seed(seed)
        self.net = MODELS[kind](recipe)
        for name, module in self.net.named_modules():
            if isinstance(module, qt.Linear):
                module.qualified_name = name  # type: ignore[assignment]
        #: Those that are open.
        self.frozen: list[qt.frozen] = []
        self.log: list[str] = []
        self.begin()
        self.actions = [getattr(self, name) for name in sorted(vars(Walk)) if name.startswith("do_")]

    def begin(self) -> None:
        """Optimizers of the current parameters."""
        given = [p for p in self.net.parameters() if p.requires_grad]
        kinds: list[Callable[[], torch.optim.Optimizer]] = [
            lambda: torch.optim.SGD(given, 0.05, momentum=0.5),
            lambda: torch.optim.SGD(given, 0.05, fused=True),
            lambda: torch.optim.AdamW(given, 0.01, fused=True),
            lambda: torch.optim.Adam(given, 0.01, foreach=True),
        ]
        self.optimizers = [kind() for kind in self.random.sample(kinds, 2)]

    def step(self) -> None:
        action = self.random.choice(self.actions)
        self.log.append(action.__name__)
        action()

    def weights(self) -> list[Tensor]:
        return [p for p in self.net.parameters() if in_high_precision(p)]

    def x(self) -> Tensor:
        return torch.randn(*self.random.choice([(2, T), (1, T), (2, 17)]), K)

    def fresh(self) -> nn.Module:
        copied = copy.deepcopy(self.net)
        assert not any(state_of(m).weights is not None for m in copied.modules() if isinstance(m, qt.Linear))
        for own, theirs in zip(self.net.parameters(), copied.parameters(), strict=True):
            theirs.grad = None if own.grad is None else own.grad.clone()
        return copied

    def run(self, net: nn.Module, x: Tensor, call: Callable[[nn.Module, Tensor], Tensor]) -> list[Tensor]:
        """Run a micro-batch; return the output, all gradients and the buffers."""
        x = x.clone().requires_grad_()
        with qt.autocast(self.recipe):
            y = call(net, x)
        y.square().sum().backward()
        assert x.grad is not None
        with torch.no_grad():
            for p in net.parameters():
                if p.grad is not None and p.grad.isfinite().all():
                    # Keeps values bounded over many micro-batches.
                    p.grad.clamp_(-10, 10)
        return [y.detach(), x.grad, *[p.grad for p in net.parameters() if p.grad is not None], *net.buffers()]

    def compare(self, call: Callable[[nn.Module, Tensor], Tensor]) -> None:
        x, other = self.x(), self.fresh()
        got = [t.clone() for t in self.run(self.net, x, call)]
        expected = self.run(other, x, call)
        for i, (a, b) in enumerate(zip(got, expected, strict=True)):
            assert_bitwise(a, b, f"result {i} of {len(got)}")

    # Actions that run the model.

    def do_micro_batch(self) -> None:
        self.compare(lambda net, x: net(x))

    do_another = do_one_more = do_micro_batch

    def do_twice_in_one_graph(self) -> None:
        self.compare(lambda net, x: net(x) + net(x * 0.5))

    def do_micro_batch_of_inputs_alone(self) -> None:
        # Both forwards come before either backward: outside of any autocast a backward ends the thread's step, so that
        # the second model's histories would roll before its forward.
        x, nets = self.x(), (self.net, self.fresh())
        leaves = [x.clone().requires_grad_() for _ in nets]
        outputs = [net(leaf) for net, leaf in zip(nets, leaves, strict=True)]
        assert_bitwise(*[y.detach() for y in outputs])
        results = [torch.autograd.grad(y.square().sum(), leaf)[0] for y, leaf in zip(outputs, leaves, strict=True)]
        assert_bitwise(*results)

    def do_checkpoint(self) -> None:
        reentrant = self.random.random() < 0.5
        again = torch.utils.checkpoint.checkpoint
        self.compare(lambda net, x: again(net, x, use_reentrant=reentrant))

    def do_own_checkpoint(self) -> None:
        self.compare(lambda net, x: qt.checkpoint(net, x))

    def do_counted(self) -> None:
        with qt.count(self.net):
            self.compare(lambda net, x: net(x))

    def do_high_precision(self) -> None:
        def call(net: nn.Module, x: Tensor) -> Tensor:
            with qt.autocast(enabled=False):
                y: Tensor = net(x)
            return y

        self.compare(call)

    def do_mixed_precision(self) -> None:
        def call(net: nn.Module, x: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                y: Tensor = net(x)
            return y.float()

        self.compare(call)

    def do_thread(self) -> None:
        errors: list[BaseException] = []

        def work() -> None:
            try:
                self.compare(lambda net, x: net(x))
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        if errors:
            raise errors[0]

    def do_evaluate(self) -> None:
        mode = self.random.choice([torch.no_grad, torch.inference_mode])
        x, other = self.x(), self.fresh()
        for _ in range(2):
            with mode():
                a, b = self.net(x), other(x)
            assert_bitwise(a, b, mode.__name__)

    do_validate = do_evaluate

    def do_forward_without_backward(self) -> None:
        with qt.autocast(self.recipe):
            self.net(self.x().requires_grad_())

    def do_write_between_forward_and_backward(self) -> None:
        weight = self.weight_of_a_gemm()
        if weight is None or getattr(self.net, "recompute", False):
            # A recomputed forward reads the current weights, as in torch.
            return
        y = self.net(self.x().requires_grad_())
        with torch.no_grad():
            weight.mul_(1.01)
        try:
            y.sum().backward()
        except RuntimeError as error:
            assert "modified by an inplace operation" in str(error)
        else:
            raise AssertionError("a write between forward and backward went unseen")

    def do_functional_call(self) -> None:
        tensors = {n: p.detach() * 1.5 for n, p in self.net.named_parameters() if in_high_precision(p)}
        if self.random.random() < 0.5:
            tensors = {name: nn.Parameter(t) for name, t in tensors.items()}
        x, other = self.x(), self.fresh()
        for name, p in other.named_parameters():
            if name in tensors:
                p.data = tensors[name].detach().clone()
        with torch.set_grad_enabled(self.random.random() < 0.7):
            a = torch.func.functional_call(self.net, tensors, x)
            b = other(x)
        assert_bitwise(a.detach(), b.detach())

    def do_interleaved(self) -> None:
        """Two graphs at once, the second forward inside `frozen`, and an evaluation between them."""
        xs, other = (self.x(), self.x()), self.fresh()
        results: list[list[Tensor]] = []
        for net in (self.net, other):
            leaves = [x.clone().requires_grad_() for x in xs]
            with qt.autocast(self.recipe):
                first = net(leaves[0])
                with torch.no_grad():
                    net(xs[1])
                with qt.frozen(net):
                    second = net(leaves[1])
            first.sum().backward()
            second.square().sum().backward()
            results.append([leaf.grad for leaf in leaves])  # type: ignore[misc]
            net.zero_grad()
        for a, b in zip(*results, strict=True):
            assert_bitwise(a, b, "interleaved")

    # Actions that write weights detectably.

    def weight_of_a_gemm(self) -> Tensor | None:
        """A weight that a backward reads."""
        linears = [module for module in self.net.modules() if isinstance(module, qt.Linear)]
        given = [layer._parameters.get("weight") for layer in linears]
        return next((p for p in given if p is not None and in_high_precision(p)), None)

    def optimize(self, step: Callable[[], Any]) -> None:
        """A step, or the sentence that refuses it."""
        held = {
            id(p)
            for f in self.frozen
            for m in f.module.modules()
            if isinstance(m, qt.Linear)
            for p in m.parameters(recurse=False)
            if p is m._parameters.get("weight")
        }
        refused = any(p.grad is not None and id(p) in held for p in self.net.parameters() if p.requires_grad)
        try:
            step()
        except ValueError as error:
            assert refused and "which is inside quaver.torch.frozen" in str(error), error
        else:
            assert not refused, "a step inside frozen"

    def do_step(self) -> None:
        self.optimize(self.random.choice(self.optimizers).step)
        self.random.choice([self.do_no_gradients, self.do_zero_gradients, lambda: None])()

    do_next = do_step

    def do_scaler(self) -> None:
        if self.frozen:
            return
        scaler, optimizer = torch.amp.GradScaler("cpu", init_scale=2.0), self.optimizers[0]
        if not any(p.grad is not None for group in optimizer.param_groups for p in group["params"]):
            return
        if self.random.random() < 0.5:
            next(p for g in optimizer.param_groups for p in g["params"] if p.grad is not None).grad.fill_(torch.inf)
            scaler.scale(torch.ones(()))
            scaler.step(optimizer)
            scaler.update()
        else:
            scaler.scale(torch.ones(()))
            scaler.step(optimizer)
        self.do_no_gradients()

    def do_lbfgs(self) -> None:
        if self.frozen:
            return
        optimizer = torch.optim.LBFGS([p for p in self.net.parameters() if p.requires_grad], lr=0.01, max_iter=2)

        def closure() -> Tensor:
            optimizer.zero_grad()
            self.compare(lambda net, x: net(x))
            return torch.ones(())

        optimizer.step(closure)

    def do_in_place(self) -> None:
        with torch.no_grad():
            for p in self.weights():
                p.mul_(self.random.choice([-1.0, 0.5, 1.25]))

    def do_load(self) -> None:
        state = {
            n: t * 0.75 if t.dtype is torch.float32 and "weight" in n and "_" not in n else t
            for n, t in self.net.state_dict().items()
        }
        self.net.load_state_dict(state, assign=self.random.random() < 0.5)
        for p in self.net.parameters():
            p.requires_grad_(p.requires_grad and p.is_floating_point())
        self.begin()

    def do_new_data(self) -> None:
        for p in self.weights():
            p.data = p.data * -1.0

    def do_swap(self) -> None:
        for p in self.weights():
            other = nn.Parameter(p.detach() * 1.25, requires_grad=p.requires_grad)
            torch.utils.swap_tensors(p, other)
        self.begin()

    def do_exchange(self) -> None:
        for module in self.net.modules():
            for name, p in list(module._parameters.items()):
                if p is not None and in_high_precision(p):
                    module._parameters[name] = nn.Parameter(p.detach() * -1.25, requires_grad=p.requires_grad)
        self.begin()

    def do_vector(self) -> None:
        given = self.weights()
        vector = nn.utils.parameters_to_vector(given).detach()
        nn.utils.vector_to_parameters(vector * 0.9, given)

    def do_cast_there_and_back(self) -> None:
        self.net.to(torch.bfloat16).to(torch.float32)

    def do_share(self) -> None:
        self.net.share_memory()

    def do_copy(self) -> None:
        if self.frozen:
            return
        normed = any(nn.utils.parametrize.is_parametrized(m) for m in self.net.modules())
        pickles = self.random.random() < 0.3 and not normed
        self.net = pickle.loads(pickle.dumps(self.net)) if pickles else copy.deepcopy(self.net)
        self.begin()

    def do_freeze_and_thaw_gradients(self) -> None:
        for p in self.weights():
            if self.random.random() < 0.3:
                p.requires_grad_(not p.requires_grad)
        if not any(p.requires_grad for p in self.net.parameters()):
            for p in self.weights():
                p.requires_grad_(True)
        self.begin()

    # Undetectable writes in situations that docs/limits.md lists as safe.

    def bare(self) -> None:
        how = self.random.randrange(4)
        for p in self.weights():
            if how == 0:
                p.data.mul_(-1.25)
            elif how == 1:
                view = p.detach().numpy()
                view *= -1.25
            elif how == 2:
                torch.from_dlpack(p.detach()).mul_(-1.25)
            else:
                p.untyped_storage().copy_(torch.zeros(p.untyped_storage().nbytes() // 4).untyped_storage())

    def do_bare_and_refresh(self) -> None:
        self.bare()
        qt.refresh(self.net)

    def do_step_by_hand(self) -> None:
        """A micro-batch that uses every parameter, a direct write, and no gradients."""
        self.compare(lambda net, x: net(x))
        if self.frozen or not all(p.requires_grad for p in self.weights()):
            return
        self.bare()
        self.do_no_gradients()

    def do_bare_between_evaluations(self) -> None:
        if not self.frozen:
            self.do_evaluate()
            self.bare()
            self.do_evaluate()
            qt.refresh(self.net)

    def do_step_inside_backward(self) -> None:
        """Each parameter is written directly as soon as its gradient exists, and the gradient is dropped."""
        if self.frozen:
            return

        def written(p: Tensor) -> None:
            p.data.mul_(1.125)
            p.grad = None

        hooks = [p.register_post_accumulate_grad_hook(written) for p in self.net.parameters() if p.requires_grad]
        x, again = self.x().requires_grad_(), torch.utils.checkpoint.checkpoint
        y = again(self.net, x, use_reentrant=True) if self.random.random() < 0.5 else self.net(x)
        y.sum().backward()
        for hook in hooks:
            hook.remove()
        self.compare(lambda net, x: net(x))

    def do_average(self) -> None:
        average = self.fresh()
        for _ in range(2):
            for own, theirs in zip(self.net.parameters(), average.parameters(), strict=True):
                if in_high_precision(own):
                    theirs.detach().lerp_(own.detach() + 0.5, 0.1)
            x = self.x()
            with torch.no_grad():
                assert_bitwise(average(x), copy.deepcopy(average)(x))

    # Actions that write no weight.

    def do_no_gradients(self) -> None:
        self.net.zero_grad(set_to_none=True)

    def do_zero_gradients(self) -> None:
        self.net.zero_grad(set_to_none=False)

    def do_frozen(self) -> None:
        if len(self.frozen) < 3:
            module = self.random.choice([self.net, *self.net.children()])
            self.frozen.append(qt.frozen(module).__enter__())

    def do_thawed(self) -> None:
        if self.frozen:
            self.frozen.pop(self.random.randrange(len(self.frozen))).__exit__(None, None, None)

    do_thawed_too = do_thawed

    def do_frozen_with_an_error(self) -> None:
        with contextlib.suppress(KeyError), qt.frozen(self.net):
            self.do_evaluate()
            raise KeyError

    def end(self) -> None:
        while self.frozen:
            self.do_thawed()


def walk(kind: str, recipe: str, seed: int, steps: int) -> None:
    """Run this many actions; a failure lists them."""
    one = Walk(kind, recipe, seed)
    try:
        for _ in range(steps):
            one.step()
    except Exception as error:
        raise AssertionError(f"{kind}, {recipe}, seed {seed}, after {one.log}") from error
    finally:
        one.end()
