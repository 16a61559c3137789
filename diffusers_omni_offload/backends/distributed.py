"""Distributed layerwise offload: several ranks hold a block's bytes together, or each streams its own."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from typing import Any

from torch import nn

from diffusers_omni_offload.agreement import Agreement, AgreementError, RanksDisagree
from diffusers_omni_offload.backends.making import LocalMaking, ShardedMaking
from diffusers_omni_offload.backends.masters import Making
from diffusers_omni_offload.backends.plan_backend import PlanBackend
from diffusers_omni_offload.config import OffloadConfig, WeightTransfer
from diffusers_omni_offload.parallel import (
    ParallelFacts,
    WeightGroup,
    cache_of,
    parallel_facts,
    require_compatible,
    weight_group,
)
from diffusers_omni_offload.platform import on_device
from diffusers_omni_offload.streaming.gather import CHUNK_NBYTES, Gather
from diffusers_omni_offload.streaming.transport import Transport
from diffusers_omni_offload.topology.plan import BlockStack, ResolvedPlan
from diffusers_omni_offload.waves import agree_on_wave, wave_facts
from diffusers_omni_offload.weights.sharded import ShardedMaster, Sharding, changed_message

_ALONE = WeightGroup("none", (0,), 0)
_AGREEMENT = "layers"


class DistributedLayerwiseBackend(PlanBackend):
    """Layerwise offload whose blocks are gathered from shares, or are resident in part.

    With rank-local weights it streams as any other. With all-gather each rank of the weight group holds a share of each
    block in host memory, so that all of them have to run the same blocks in the same order. What they are about to do
    is compared on the host before each call, each forward of such a component and at the end of a call: ranks that
    differ get an error, and no output of theirs is ever made of mixed weights.

    Attributes:
        group: the ranks that hold the weights together.
        is_gathered: whether the weights are in memory for the body of `gather`.
    """

    group = _ALONE
    is_gathered = False
    chunk_nbytes = CHUNK_NBYTES
    _agreement: Agreement | None = None
    _gather: Gather | None = None
    _facts = ParallelFacts()
    _gathers = 0
    _has_met = False
    _shared_out: frozenset[nn.Module] = frozenset()

    # ------------------------------------------------------------------ lifecycle

    def install(self, plan: ResolvedPlan, undo: ExitStack) -> None:
        """See `PlanBackend.install`. With all-gather every rank of the group has to come here at the same time; a
        failure before the last step leaves each rank's pipeline as it was.

        Raises:
            AgreementError: the ranks differ, or one is missing or has failed.
            ValueError: all-gather can't be combined with how the weights are loaded or parallelised.
        """
        stacks = [stack for stack in plan.stacks if _is_gathered(stack)]
        try:
            group = self._group_for(plan, stacks)
        except ValueError as error:
            tell_other_ranks(self.config, dict(_components_of(plan)), error)
            raise
        if group.size == 1:
            super().install(plan, undo)
            return
        agreement = Agreement(group, _AGREEMENT)
        try:
            agreement.require_equal(_topology(plan, self.config), "what they offload")
            undo.callback(self._leave)
            self.group, self._agreement = group, agreement
            self._shared_out = frozenset(stack.blocks[index] for stack in stacks for index in stack.streamed)
            super().install(plan, undo)
            self.runner.before_entry = self._agree_on_forward
            self.runner.keeps_slots = True
            self._agree_on_weights(agreement, "the weights of their blocks")
        except BaseException as error:
            agreement.fail(error)
            raise
        self._commit()
        self.origins.release(plan, self._shared_out)

    def transports(self) -> list[Transport]:
        local = super().transports()
        if self._agreement is None:
            return local
        self._gather = Gather(self.platform, self.group.process_group)
        return [self._gather, *local]

    def making(self) -> Making:
        local = LocalMaking(self.platform, self.budget, self.origins)
        return local if self._agreement is None else ShardedMaking(local, self._shared_out, self._share)

    def tear_down(self) -> None:
        """See `PlanBackend.tear_down`. With all-gather each rank gets complete weights, so all have to come here.

        Raises:
            AgreementError: a rank doesn't come; nothing was changed.
            RuntimeError: a collective has failed, so that the weights can't be brought together any more. The hooks are
                gone and the memory is given back; the streamed weights are lost.
        """
        if self._agreement is not None and self._gather is not None and self._gather.error is not None:
            error = self._gather.error
            self._agreement.fail(error, again=True)
            super().tear_down()
            raise RuntimeError(
                f"Offload was disabled, but the weights that the ranks held together are lost: {error}"
            ) from error
        self.bring_home()
        super().tear_down()

    def bring_home(self) -> None:
        """See `PlanBackend.bring_home`: all ranks have to come here, and get complete weights.

        Raises:
            AgreementError: a rank doesn't come; nothing was changed.
        """
        if self._gather is None or self._gather.error is None:
            self._bring_back("disable_omni_offload()", self._committed())

    def _forget(self) -> None:
        super()._forget()
        self._leave()

    def _leave(self) -> None:
        self.group, self._agreement, self._gather = _ALONE, None, None
        self._shared_out, self.is_gathered = frozenset(), False

    def _group_for(self, plan: ResolvedPlan, stacks: Sequence[BlockStack]) -> WeightGroup:
        if not stacks:
            return _ALONE
        dits = dict(_components_of(plan, "dit"))
        self._facts = parallel_facts(self.config, dits)
        require_compatible(self.config, self._facts, _gathered_components(plan))
        return weight_group(self.config, dits)

    def _refuse_caches(self) -> None:
        """A cache that was enabled since lets a rank skip blocks that the others gather."""
        assert self.plan is not None
        # What else is incompatible was looked at when the weights could be; now wrappers have parts that are withheld.
        cached = {path: it for path, it in _gathered_components(self.plan).items() if cache_of(it) is not None}
        require_compatible(self.config, self._facts, cached)

    def _share(self, nbytes: int) -> Sharding:
        return Sharding(nbytes, self.group.size, self.group.rank, self.chunk_nbytes)

    def _sharded(self) -> list[ShardedMaster]:
        return [master for master in self.masters if isinstance(master, ShardedMaster)]

    def _committed(self) -> list[ShardedMaster]:
        return [master for master in self._sharded() if master.is_committed]

    def _agree_on_weights(self, agreement: Agreement, what: str) -> None:
        """See that a block gathered from all shares is the block that each rank has."""
        masters = self._sharded()
        agreement.require_equal({master.path: master.digest for master in masters}, what)
        answers = agreement.exchange({master.path: master.checksums for master in masters}, what)
        ranks = self.group.ranks
        for index, answer in enumerate(answers):
            following = (index + 1) % len(answers)
            for path, (_, read) in answer.items():
                if answers[following][path][0] != read:
                    raise RanksDisagree(
                        f"{path} has other weights on rank {ranks[following]} than on rank {ranks[index]}. Each holds "
                        "a share of the same weights: load, edit and quantize them in the same way on all ranks."
                    )

    def _commit(self) -> None:
        for master in self._sharded():
            master.commit()

    # ------------------------------------------------------------------ calls

    def agree_on_call(
        self, name: str, signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        """Before a pipeline's call: see that all ranks make one that runs the same blocks.

        Raises:
            AgreementError: they don't, or one is missing or has failed. Nothing was run.
            ValueError: the number of steps isn't given.
        """
        if self._agreement is None or self.scope.is_open:
            return
        self._refuse_gathered()
        self._require_unbroken()
        try:
            self._refuse_caches()
            facts = wave_facts(signature, args, kwargs)
        except BaseException as error:
            self._agreement.fail(error)
            raise
        self._has_met = True
        agree_on_wave(self._agreement, facts, f"the call of {name}")

    def opened(self, prepare: Callable[[], None] | None = None) -> AbstractContextManager[None]:
        """See `PlanBackend.opened`. Inside of `gather` there is no call to be in; components that run are refused."""
        return nullcontext() if self.is_gathered else super().opened(prepare)

    def audit(self) -> bool:
        self._refuse_gathered()
        return super().audit()

    def _refuse_gathered(self) -> None:
        if self.is_gathered:
            raise RuntimeError(
                "A component ran inside of `with pipe.omni_offload.gather():`, or after a body whose changes the ranks "
                "couldn't agree on. There the weights are in host memory, to be read and changed; run it after the "
                "body, or enter gather() once more and make them the same."
            )

    def merging(self) -> AbstractContextManager[None]:
        """See `PlanBackend.merging`.

        Raises:
            RuntimeError: the weights are divided among ranks; inside of `gather` they aren't.
        """
        if self.is_gathered:
            return self._merging_gathered()
        committed = self._committed()
        if committed:
            raise RuntimeError(changed_message(committed[0].path.rpartition(".")[0]))
        return super().merging()

    @contextmanager
    def _merging_gathered(self) -> Iterator[None]:
        with on_device(self.device), self.lora.on_device():
            yield

    @contextmanager
    def gather(self) -> Iterator[None]:
        """In the body all weights are ordinary CPU tensors; at its end they are divided among the ranks as they are
        then. Every rank has to enter, and to change them in the same way.

        Raises:
            AgreementError: a rank doesn't come, or has changed its weights in another way.
            RuntimeError: a call is running.
        """
        if self._agreement is None:
            with super().gather():
                yield
            return
        with self.scope.exclusive("gathered"):
            self._bring_back("gather()", self._committed())
            self.is_gathered = True
        self._gathers += 1
        try:
            yield
        finally:
            self._gathers -= 1
            if not self._gathers:
                with self.scope.exclusive("divided"), on_device(self.device):
                    self._divide()

    def remove_component(self, module: nn.Module) -> None:
        inside = set(module.modules())
        own = [master for block in self._shared_out & inside if (master := self.masters.of(block)) is not None]
        self._bring_back("disabling a part of it", [m for m in own if isinstance(m, ShardedMaster) and m.is_committed])
        super().remove_component(module)

    def _divide(self) -> None:
        """Take this rank's share of the weights as they are now."""
        assert self._agreement is not None
        try:
            for master in self._sharded():
                master.pack()
            self._agree_on_weights(self._agreement, "the weights that they have changed in gather()")
        except BaseException as error:
            self._agreement.fail(error)
            raise
        self._commit()
        self.is_gathered = False
        self.masters.follow([master for master in self.masters.stale() if not isinstance(master, ShardedMaster)])
        self.residency.place(self.masters.held())
        self.look_again()

    def _bring_back(self, what: str, masters: Sequence[ShardedMaster]) -> None:
        """Gather blocks, and make their weights ordinary CPU tensors."""
        if self._agreement is None or not masters:
            return
        self._meet(what)
        with on_device(self.device):
            for block, master in enumerate(self.streamer.masters):
                if isinstance(master, ShardedMaster) and master in masters:
                    with self.streamer.held(block) as buffer:
                        master.restore(buffer)

    def _agree_on_forward(self, path: str) -> None:
        if self._agreement is not None and self._is_shared_out(path):
            self._meet(f"a forward of {path}")

    def _is_shared_out(self, path: str) -> bool:
        assert self.plan is not None
        return any(stack.component == path and _is_gathered(stack) for stack in self.plan.stacks)

    def _after_call(self) -> None:
        if self._agreement is not None:
            self._meet("the end of a call")
            self._has_met = False
        super()._after_call()

    def _call_failed(self) -> None:
        super()._call_failed()
        error = sys.exc_info()[1]
        if self._agreement is not None and error is not None and self._has_met:
            # Others may wait, unless it is they who are to blame. What ran without them, a stray encoder say, is nobody
            # else's concern.
            if not isinstance(error, AgreementError):
                self._agreement.fail(error)
        self._has_met = False

    def _meet(self, what: str) -> None:
        """See that all ranks are here, and have gathered the same blocks so far.

        Raises:
            AgreementError: they haven't, so that nothing can be gathered any more; or one is missing or has failed.
        """
        assert self._agreement is not None and self._gather is not None
        self._require_unbroken()
        order = self.streamer.order
        own = {"history": self._gather.digest, "progress": self._gather.progress, "order": order.digest}
        self._has_met = True
        answers = self._agreement.exchange(own, what)
        if len({answer["order"] for answer in answers}) > 1:
            # An error that only some of them had may have taught them different things; they go on as declared.
            order.unlearn()
        if len({answer["history"] for answer in answers}) > 1:
            of_ranks = zip(self.group.ranks, answers, strict=True)
            each = "; ".join(f"rank {rank}: {answer['progress']}" for rank, answer in of_ranks)
            error = (
                f"Before {what} the ranks have gathered different blocks ({each}). Their weights can't be brought "
                "together any more; start the processes anew."
            )
            self._gather.error = RuntimeError(error)
            raise RanksDisagree(error)

    def _require_unbroken(self) -> None:
        """Raises RuntimeError, here and in the others' next exchange, if a collective has failed: no rank waits for one
        that can't go on."""
        assert self._agreement is not None and self._gather is not None
        if self._gather.error is not None:
            self._agreement.fail(self._gather.error, again=True)
            raise RuntimeError(str(self._gather.error)) from self._gather.error


def tell_other_ranks(config: OffloadConfig, components: Mapping[str, nn.Module], error: BaseException) -> None:
    """This rank can't enable what the others are about to enable with it: they hear of it at once. Never raises."""
    if not config.uses_allgather:
        return
    with suppress(AgreementError, ValueError):
        Agreement(weight_group(config, components), _AGREEMENT).fail(error)


def _is_gathered(stack: BlockStack) -> bool:
    return stack.options.weight_transfer is WeightTransfer.ALLGATHER and bool(stack.streamed)


def _components_of(plan: ResolvedPlan, role: str | None = None) -> Iterator[tuple[str, nn.Module]]:
    return ((part.path, part.module) for part in plan.components if role in (None, part.role))


def _gathered_components(plan: ResolvedPlan) -> dict[str, nn.Module]:
    return {stack.component: plan.component(stack.component).module for stack in plan.stacks if _is_gathered(stack)}


def _topology(plan: ResolvedPlan, config: OffloadConfig) -> dict[str, Any]:
    """What has to be the same on all ranks for their blocks to be gathered together."""
    stacks = {
        stack.component: {
            "blocks": list(stack.block_paths),
            "resident": list(stack.resident),
            "weight_transfer": stack.options.weight_transfer.value,
        }
        for stack in plan.stacks
    }
    return {"slots": config.slots, **stacks}
