"""Small faults put into a copy of the package one after the other: some test must notice each.
``make mutants`` runs them.

A mutant that no longer applies, because its line has changed, counts as a failure: write it anew.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
LEFT_OUT = shutil.ignore_patterns(
    ".git", ".venv", "build", "dist", "*.egg-info", ".*_cache", ".hypothesis", "site"
)


PARTS = 3


class Mutant(NamedTuple):
    fault: str
    file: str
    line: str  # part of a line, or some lines, that the file holds once
    becomes: str
    tests: str  # that notice


MUTANTS = [
    Mutant(
        "a report after a long collection is no sign of life",
        "collectives/transports/epochs.py",
        "self._probe(place).hear()",
        "pass",
        "tests/transports/test_epochs.py",
    ),
    Mutant(
        "silence grows while this process is stopped",
        "collectives/transports/meeting.py",
        "return self._looked - self.answered",
        "return time.monotonic() - self.answered",
        "tests/transports/test_epochs.py",
    ),
    Mutant(
        "vectors beside coded factors travel in float32",
        "collectives/powersgd.py",
        "return codec.rows if isinstance",
        "return EXACT if isinstance",
        "tests/codecs/test_low_rank.py",
    ),
    Mutant(
        "vectors beside factors in four bits travel in four",
        "commpress/codecs/whole_tensors.py",
        "self.factors.row_bytes(1 << 12) >= 1 << 12",
        "True",
        "tests/codecs/test_low_rank.py",
    ),
    Mutant(
        "what coding Q loses is lost",
        "collectives/powersgd.py",
        "proposed.sent[kept : kept + numel] += buffer[first : first + numel]",
        "pass",
        "tests/codecs/test_low_rank.py",
    ),
    Mutant(
        "the error of a reduced factor counts as one rank's",
        "collectives/powersgd.py",
        "new.join(message.pieces, rank, divisor)",
        "new.join(message.pieces, rank, 1.0)",
        "tests/codecs/test_low_rank.py",
    ),
    Mutant(
        "a matrix of another rank begins with a new basis",
        "collectives/powersgd.py",
        "view[: len(known)] = known",
        "view[: len(known)] = known if len(known) == rank else view[: len(known)]",
        "tests/codecs/test_low_rank.py -k other_ranks",
    ),
    Mutant(
        "ranks are chosen without a look at their bytes",
        "commpress/plan/assignment.py",
        "sum(row[uniform] for row in nbytes))",
        "sum(map(max, nbytes)))",
        "tests/plan/test_rank_choice.py",
    ),
    Mutant(
        "a sketch sees few of the largest singular vectors",
        "commpress/plan/assignment.py",
        "for _ in range(2):\n            sketch",
        "for _ in range(0):\n            sketch",
        "tests/plan/test_rank_choice.py",
    ),
    Mutant(
        "errors of factors between nodes are in units of a rank",
        "collectives/exchange.py",
        "scale=hierarchy.scale,",
        "scale=1.0,",
        "tests/codecs/test_low_rank.py",
    ),
    Mutant(
        "coded factors share blocks with their neighbours",
        "collectives/powersgd.py",
        "        if not factors.lossless:\n            spans = [",
        "        if False:\n            spans = [",
        "tests/fsdp/test_fsdp_whole.py",
    ),
    Mutant(
        "eight bits of gradients have equal steps",
        "integrations/ddp/hook.py",
        """        self,
        codec: str | Codec | Policy | PerLayer = "fp8",""",
        """        self,
        codec: str | Codec | Policy | PerLayer = "int8",""",
        "tests/foreign/test_asleep.py",
    ),
    Mutant(
        "the residual keeps what was sent",
        "commpress/feedback.py",
        ("            setattr(self, name, theirs)\n            setattr(other, name, mine)"),
        ("            setattr(self, name, mine)\n            setattr(other, name, theirs)"),
        "tests/collectives/test_allreduce.py",
    ),
    Mutant(
        "a mean that is not finite is committed",
        "collectives/allreduce.py",
        ("    if outcome.finite:\n        outcome.commit()"),
        "    outcome.commit()",
        "tests/collectives/test_allreduce.py",
    ),
    Mutant(
        "both directions draw the same noise",
        "collectives/allreduce.py",
        "direction * 0xC2B2AE35",
        "0 * direction",
        "tests/collectives/test_allreduce.py",
    ),
    Mutant(
        "a mean that comes back in another codec forgets that a row stands for several ranks",
        "collectives/allreduce.py",
        "factor = ranks / divisor if divisor else 1.0",
        "factor = 1.0",
        "tests/collectives/test_two_level.py",
    ),
    Mutant(
        "all ranks draw the same noise",
        "collectives/allreduce.py",
        "rank * 0x85EBCA6B",
        "0 * rank",
        "tests/collectives/test_allreduce.py",
    ),
    Mutant(
        "what is owed is paid twice",
        "commpress/feedback.py",
        "                reduced.zero_()",
        "",
        "tests/codecs/test_feedback.py",
    ),
    Mutant(
        "an owner sends an update without what earlier ones lack",
        "commpress/optim/muon.py",
        "                sent.add_(self.gradients.view(self.lacking, j).view(shape))",
        "                pass",
        "tests/optim/test_muon.py",
    ),
    Mutant(
        "an update lacks what it has brought",
        "commpress/optim/muon.py",
        "torch.sub(sent, decoded.view(-1), out=",
        "torch.sub(decoded.view(-1), sent, out=",
        "tests/optim/test_muon.py",
    ),
    Mutant(
        "a step of Muon whose gradients are not finite is taken",
        "commpress/optim/muon.py",
        "taken = all(outcome.finite for outcome in outcomes)",
        "taken = True",
        "tests/optim/test_muon.py",
    ),
    Mutant(
        "a matrix without a gradient anywhere takes a step",
        "commpress/optim/muon.py",
        "trained = {i for i in range(len(has)) if every[:, i].any()}",
        "pass",
        "tests/optim/test_muon.py",
    ),
    Mutant(
        "codes of gradients may be coarse",
        "commpress/optim/muon.py",
        "    if error > COARSEST:",
        "    if error > 1:",
        "tests/optim/test_muon.py",
    ),
    Mutant(
        "a Muon goes on with the momentum of a matrix of another shape",
        "commpress/optim/muon.py",
        "any(part.shape != shape for part in kept.values())",
        "False",
        "tests/optim/test_muon.py",
    ),
    Mutant(
        "owners are dealt matrices in turn",
        "commpress/optim/newton_schulz.py",
        "        owners[i] = loads.index(min(loads))",
        "        owners[i] = i % ranks",
        "tests/optim/test_muon.py",
    ),
    Mutant(
        "a step of rows begins although a gradient is not finite",
        "commpress/optim/muon_shards.py",
        "return bool(every[:, 0].all()), trained",
        "return True, trained",
        "tests/optim/test_muon_shards.py",
    ),
    Mutant(
        "a matrix in rows that stands still loses what its updates lack",
        "commpress/optim/muon_shards.py",
        "            sent.copy_(lacking[key_of])",
        "            pass",
        "tests/optim/test_muon_shards.py",
    ),
    Mutant(
        "rows are loaded from where those of the first rank begin",
        "commpress/optim/muon_shards.py",
        """first = box_of(parameters[name])["begin"][0] - parts[0]["begin"]""",
        "first = 0",
        "tests/optim/test_muon_shards.py",
    ),
    Mutant(
        "an owner takes all matrices in one turn",
        "collectives/owned_rows.py",
        "            turn[owner] += 1",
        "            pass",
        "tests/optim/test_muon_shards.py",
    ),
    Mutant(
        "experts in one tensor share a norm",
        "commpress/optim/newton_schulz.py",
        "torch.stack([each.norm() for each in x])[:, None, None]",
        "x.norm()",
        "tests/optim/test_muon.py",
    ),
    Mutant(
        "parts of a matrix have the rate of the whole",
        "commpress/optim/newton_schulz.py",
        "(count, weights.shape[-1])",
        "weights.shape[-2:]",
        "tests/optim/test_muon.py",
    ),
    Mutant(
        "rows in the middle take the rates of the first rows",
        "commpress/optim/newton_schulz.py",
        "    first = -begin",
        "    first = 0",
        "tests/optim/test_muon_shards.py",
    ),
    Mutant(
        "the pieces of an owned matrix arrive at one place",
        "collectives/owners.py",
        "place=part.at + first,",
        "place=part.at,",
        "tests/optim/test_muon.py",
    ),
    Mutant(
        "a scatter commits what is not finite",
        "collectives/reduce_scatter.py",
        "Outcome(deal.every, not flags & NOT_FINITE,",
        "Outcome(deal.every, True,",
        "tests/collectives/test_reduce_scatter.py",
    ),
    Mutant(
        "a node's NaN stays in the node",
        "collectives/two_level.py",
        "flag.fill_(not all(outcome.finite for outcome in outcomes) or bool(flag))",
        "flag.zero_()",
        "tests/collectives/test_two_level.py",
    ),
    Mutant(
        "an elastic state holds a rank's reduced residual once for all ranks",
        "commpress/feedback.py",
        "own += size * reduced[: own.numel()]",
        "own += reduced[: own.numel()]",
        "tests/state/test_laws.py -k another_number",
    ),
    Mutant(
        "any rank's exact state is taken",
        "collectives/residual_state.py",
        'if (first["size"], first["rank"]) != (transport.size, transport.rank):',
        'if first["size"] != transport.size:',
        "tests/ddp/test_resume.py -k belong",
    ),
    Mutant(
        "a window decays no weights",
        "commpress/optim/optimizer.py",
        'return 1 - float(group["lr"]) * group["weight_decay"]',
        "return 1.0",
        "tests/optim/test_zero_one_adam.py",
    ),
    Mutant(
        "one exact step too many",
        "commpress/optim/zero_one_adam.py",
        "        if step < self.warmup or",
        "        if step <= self.warmup or",
        "tests/optim/test_zero_one_adam.py tests/codecs/test_schedules.py",
    ),
    Mutant(
        "the variance is updated inside a window",
        "commpress/optim/zero_one_adam.py",
        "if self.held == 0 and count(step + 1)",
        "if count(step + 1)",
        "tests/optim/test_zero_one_adam.py",
    ),
    Mutant(
        "updates of an interval are rounded down",
        "commpress/schedules.py",
        "self.per_interval * octave + -(-inside >> octave)",
        "self.per_interval * octave + (inside >> octave)",
        "tests/codecs/test_schedules.py",
    ),
    Mutant(
        "hidden rounds grow before the codec gets coarser",
        "commpress/schedules.py",
        "rounds.needed(pace) > MOST",
        "rounds.needed(pace) > 99",
        "tests/local_updates/test_hidden_rounds.py",
    ),
    Mutant(
        "a coarser codec that gains nothing is tried again and again",
        "commpress/schedules.py",
        "                self.last = self.number - 1\n                self._go(self.last)",
        "                self._go(self.number - 1)",
        "tests/local_updates/test_hidden_rounds.py",
    ),
    Mutant(
        "a resumed run forgets the codec of its rounds",
        "commpress/schedules.py",
        'codec = Rung.of(state["codec"]) if "codec" in state',
        'codec = Rung() if "codec" in state',
        "tests/local_updates/test_hidden_rounds.py",
    ),
    Mutant(
        "QSR is linear",
        "commpress/schedules.py",
        "power = 2",
        "power = 1",
        "tests/codecs/test_schedules.py",
    ),
    Mutant(
        "a frozen rate that rises counts as stable",
        "commpress/schedules.py",
        "if step < self.earliest or facts.peak_step >= step - 1 > 0:",
        "if step < self.earliest:",
        "tests/codecs/test_schedules.py",
    ),
    Mutant(
        "each rank clips by its own norm",
        "integrations/zero/partitioned.py",
        (
            "        norm = torch.tensor(\n"
            "            sum(self._every(mine)) ** 0.5, dtype=torch.float32, "
            "device=self.buckets[0].device\n"
            "        )"
        ),
        (
            "        norm = torch.tensor(mine**0.5, dtype=torch.float32, "
            "device=self.buckets[0].device)"
        ),
        "tests/zero/test_partitioned.py",
    ),
    Mutant(
        "a put reads the tensor that it replaces",
        "tiered_mem/packs.py",
        (
            "        return (\n"
            "            (block.slot is not None and not block.leaving)\n"
            "            or block.size < self.below\n"
            "            or len(block.entries) > 1\n"
            "        )"
        ),
        "        return True or block.size < self.below or len(block.entries) > 1",
        "tests/store/test_store.py",
    ),
    Mutant(
        "a record of an unknown version is read",
        "tiered_mem/folders.py",
        "            if found != magic:",
        "            if False:",
        "tests/store/test_store_damage.py",
    ),
    Mutant(
        "a manifest before its data",
        "tiered_mem/commit.py",
        ("                self._sync()\n                self._write(cut, snapshot)"),
        ("                self._write(cut, snapshot)\n                self._sync()"),
        "tests/store/test_store_crash.py",
    ),
    Mutant(
        "differences from other weights are applied",
        "integrations/weights/version_log.py",
        "    if record.base_digest != held.digest:",
        "    if False:",
        "tests/weights/test_receiving.py",
    ),
    Mutant(
        "a publisher that goes on from a copy begins with the first epoch",
        "integrations/weights/version_log.py",
        "head.epoch if head else 0]",
        "0]",
        "tests/weights/test_receiving.py",
    ),
    Mutant(
        "ranks do not learn that another's copy could not advance",
        "integrations/weights/publisher.py",
        "        self._gather.together(settle)",
        "        settle()",
        "tests/weights/test_publishing.py",
    ),
    Mutant(
        "a publisher that ends takes the copies of the next one along",
        "integrations/weights/publisher.py",
        'prefix = f"published/{run}/{epoch}/"',
        'prefix = f"published/{run}/"',
        "tests/weights/test_weight_watching.py",
    ),
    Mutant(
        "a copy that follows ends when its server is away",
        "commpress/cli/weight_copies.py",
        "            if not options.follow:\n                raise",
        "            raise",
        "tests/weights/test_weights_commands.py",
    ),
    Mutant(
        "integers are installed as floats",
        "integrations/weights/receiver.py",
        "        wide = value.is_floating_point() and target",
        "        wide = target",
        "tests/weights/test_receiving.py",
    ),
    Mutant(
        "a name of a mapping that the model does not have is ignored",
        "integrations/weights/receiver.py",
        "        if name not in targets or not (",
        "        if not (",
        "tests/weights/test_weights_misuse.py",
    ),
    Mutant(
        "a sparse code may go on behind its last difference",
        "kernels/cpu/sources/exact_loops.py",
        "    return 0 if (bit + 7) >> 3 == code.size else -1",
        "    return 0",
        "tests/weights/test_exact_code.py",
    ),
    Mutant(
        "drafts of publishers that were killed stay",
        "integrations/weights/version_log.py",
        "        if name in old or name.endswith(PART):",
        "        if name in old:",
        "tests/weights/test_weights_kills.py",
    ),
    Mutant(
        "a tensor that is sharded anew is published as it was before",
        "integrations/weights/own_part.py",
        "                if (name, now, tensor.shape, own.shape) == (*described, piece.size):",
        "                if True:",
        "tests/weights/test_weights_misuse.py",
    ),
    Mutant(
        "a server looks for a newer version two hundred times a second",
        "integrations/weights/places.py",
        "LOOK = 0.05  # seconds",
        "LOOK = 0.005  # seconds",
        "tests/weights/test_weights_http.py",
    ),
    Mutant(
        "a block is not compared with its hash",
        "integrations/weights/replay.py",
        "            if hash_of(content, part, block) != int(record.hashes[part][block]):",
        "            if False:",
        "tests/weights/test_receiving.py",
    ),
    Mutant(
        "a round is taken although one of its exchanges was not finite",
        "collectives/exchange.py",
        "            self.finite &= finite",
        "            pass",
        "tests/collectives/test_finite.py",
    ),
    Mutant(
        "the loss scale stays in residuals",
        "integrations/ddp/hook.py",
        "gain = 1.0 / self._scale.of(self.grad_scaler) if self.grad_scaler else 1.0",
        "gain = 1.0",
        "tests/collectives/test_finite.py",
    ),
    Mutant(
        "a float16 mean overflows in silence",
        "integrations/ddp/hook.py",
        "                finite = bool(torch.isfinite(bucket).all())",
        "                finite = True",
        "tests/collectives/test_finite.py",
    ),
    Mutant(
        "two calls of other dtypes agree",
        "integrations/process_group/records.py",
        "code = NO_DTYPE if dtype is None else _DTYPES.get(dtype, OTHER_DTYPE)",
        "code = NO_DTYPE",
        "tests/process_group/test_group_faults.py",
    ),
    Mutant(
        "a gradient counts however far it is from what is usual",
        "kernels/cpu/sources/adam_loops.py",
        "            new = where_finite(new, within(new, reach * divisor), new)",
        "",
        "tests/optim/test_optim_arithmetic.py",
    ),
    Mutant(
        "momentum below the floor is what one bit says",
        "kernels/cpu/sources/adam_loops.py",
        (
            "            put(\n"
            "                where_less(own, low, within(momentum, most * own), momentum),\n"
            "                m,\n"
            "                at,\n"
            "                left,\n"
            "                beyond_caches,\n"
            "            )"
        ),
        "            put(momentum, m, at, left, beyond_caches)",
        "tests/optim/test_optim_arithmetic.py tests/optim/test_tensor_states.py",
    ),
    Mutant(
        "only who saw it thaws a tensor",
        "commpress/optim/optimizer.py",
        "np.flatnonzero(every.any(axis=0))",
        "np.flatnonzero(self.tensors.waking())",
        "tests/optim/test_tensor_states.py",
    ),
    Mutant(
        "who asks is not passed on",
        "collectives/allreduce.py",
        "flag | asked, transport",
        "flag, transport",
        "tests/optim/test_tensor_states.py",
    ),
    Mutant(
        "one rank alone takes what is not finite",
        "commpress/optim/replicated.py",
        "if self.overflowed or not isfinite(self.squares()) or",
        "if self.overflowed or",
        "tests/optim/test_optim_common.py",
    ),
    Mutant(
        "weights that need no gradient decay",
        "commpress/optim/optimizer.py",
        "return p.requires_grad or p.grad is not None",
        "return True",
        "tests/optim/test_optim_common.py",
    ),
    Mutant(
        "a window loses who is left alone from its middle on",
        "commpress/optim/zero_one_adam.py",
        "return i in self._members if self.held else super().is_trained(i)",
        "return super().is_trained(i)",
        "tests/optim/test_optim_common.py",
    ),
    Mutant(
        "tensors freeze that have never had a gradient",
        "commpress/optim/tensor_states.py",
        "return int((v > 0).sum()) >= (1 - UNSEEN) * v.numel()",
        "return True",
        "tests/optim/test_tensor_states.py",
    ),
    Mutant(
        "what a thawed tensor was owed is lost",
        "commpress/optim/onebit_adam.py",
        "            self._momenta[i].addcmul_(owed, self.unit(i))\n",
        "",
        "tests/optim/test_tensor_states.py",
    ),
    Mutant(
        "a frozen variance falls behind AdamW's correction",
        "commpress/optim/tensor_states.py",
        "if abs(ratio - 1) > 1e-6:",
        "if False:",
        "tests/optim/test_tensor_states.py",
    ),
    Mutant(
        "tensors that travel whole leave behind what owners of rows owed",
        "collectives/exchange.py",
        "feedback.join(plan.message.pieces, channel.rank)",
        "pass",
        "tests/codecs/test_low_rank.py tests/optim/test_optim_whole.py",
    ),
    Mutant(
        "what all know of momentum is forgotten",
        "commpress/optim/onebit_adam.py",
        '                self.add_known(frozen, group["betas"][0])',
        "",
        "tests/optim/test_optim_whole.py",
    ),
    Mutant(
        "factors carry no question",
        "collectives/powersgd.py",
        "asked |= outcome.asks",
        "pass",
        "tests/optim/test_optim_whole.py",
    ),
    Mutant(
        "bases stay out of an optimizer's checkpoint",
        "collectives/state.py",
        "            each.load_choices(_within(state, name))\n",
        "            pass\n",
        "tests/optim/test_optim_whole.py",
    ),
    Mutant(
        "a skipped step counts as a trip",
        "commpress/optim/tensor_states.py",
        "in seen.items() if taken else ():",
        "in seen.items():",
        "tests/optim/test_tensor_states.py",
    ),
    Mutant(
        "an exact step of 0/1 Adam divides by the bare root",
        "commpress/optim/zero_one_adam.py",
        ("            self._close_alone()\n        if self.windows.updates == self.steps_done:"),
        ("            self._close_alone()\n        if True:"),
        "tests/optim/test_zero_one_adam.py tests/optim/test_tensor_states.py",
    ),
    Mutant(
        "any token is let in at the meeting",
        "collectives/transports/meeting.py",
        "if not secrets.compare_digest(token, self.token):",
        "if False:",
        "tests/transports/test_meeting.py",
    ),
    Mutant(
        "any proof of the run's key is taken",
        "collectives/transports/meeting.py",
        "if not proves(visitor.words[-PROOF:], proof(self._key, CALLER, *seen)):",
        "if False:",
        "tests/transports/test_run_key.py",
    ),
    Mutant(
        "a caller without the run's key is let in",
        "collectives/transports/meeting.py",
        (
            "        if bool(kind & KEYED) != (self._key is not None):\n"
            "            self._refuse(visitor)\n"
            "            return None\n"
            "        if self._key is None:"
        ),
        "        if not kind & KEYED:",
        "tests/transports/test_run_key.py",
    ),
    Mutant(
        "any door is believed to have the run's key",
        "collectives/transports/meeting.py",
        "return answer if proves(given, proof(self._key, DOOR, *seen)) else DIFFERS",
        "return answer",
        "tests/transports/test_run_key.py",
    ),
    Mutant(
        "a proof is good for any door",
        "collectives/transports/run_key.py",
        "challenge, answer, place.encode())",
        "challenge, answer)",
        "tests/transports/test_run_key.py",
    ),
    Mutant(
        "a door challenges everybody alike",
        "collectives/transports/meeting.py",
        "visitor.challenge, visitor.until = nonce(), ",
        "visitor.challenge, visitor.until = bytes(NONCE), ",
        "tests/transports/test_run_key.py",
    ),
    Mutant(
        "who joins wins by the age that it says",
        "collectives/transports/membership.py",
        "if lineage != base.lineage and age >= years and age > 0:",
        "if lineage != base.lineage and age == years and age > 0:",
        "tests/transports/test_epochs.py",
    ),
    Mutant(
        "strangers wait without limit",
        "collectives/transports/meeting.py",
        "if len(self._visitors) >= self._room:",
        "if False:",
        "tests/transports/test_meeting.py",
    ),
    Mutant(
        "a payload shorter than due is taken",
        "collectives/transports/sockets.py",
        "elif self.length != len(payload):",
        "elif self.length > len(payload):",
        "tests/transports/test_sockets.py",
    ),
    Mutant(
        "the version of a header is not looked at",
        "collectives/frame.py",
        ("    if version != _VERSION:\n        return None"),
        "",
        "tests/collectives/test_frame.py",
    ),
    Mutant(
        "payloads are not checked",
        "collectives/frame.py",
        "    if frame.checked:",
        "    if False:",
        "tests/collectives/test_frame.py",
    ),
    Mutant(
        "flags are left out of the checksum",
        "collectives/frame.py",
        "checksum_of(payload, flags)",
        "checksum_of(payload, 0)",
        "tests/collectives/test_frame.py",
    ),
    Mutant(
        "lengths from the wire are taken as they come",
        "collectives/transports/sockets.py",
        "== told and length <= limit",
        "== told",
        "tests/transports/test_sockets.py",
    ),
    Mutant(
        "pieces of a connection that ended are not sent again",
        "collectives/transports/sockets.py",
        "                peer.pieces.appendleft(piece)",
        "                pass",
        "tests/transports/test_lanes.py",
    ),
    Mutant(
        "pieces that nobody has confirmed stay in the tensor's memory",
        "collectives/transports/sockets.py",
        "                    piece.keep()",
        "                    pass",
        "tests/transports/test_lanes.py",
    ),
    Mutant(
        "a child keeps its parent's connections",
        "collectives/transports/meeting.py",
        "        owner.forked()",
        "        pass",
        "tests/transports/test_meeting.py",
    ),
    Mutant(
        "every rank keeps the first one's slice of a whole tensor",
        "integrations/fsdp/whole_parameters.py",
        "own = slices[self.channel.rank]",
        "own = slices[0]",
        "tests/fsdp/test_fsdp_whole.py",
    ),
    Mutant(
        "bases of a sharded model are not loaded",
        "integrations/fsdp/shard_checkpoint.py",
        "    _load_choices(state, saved)",
        "",
        "tests/state/test_real_ranks.py -k matrices",
    ),
    Mutant(
        "an outer step although the exchange does not count",
        "commpress/optim/local_updates.py",
        "        if taken:",
        "        if True:",
        "tests/local_updates/test_local_updates.py",
    ),
    Mutant(
        "a round is shorter than its overlap",
        "commpress/optim/rounds.py",
        "self.length = max(self.every.interval(step, rate, facts), self.shortest)",
        "self.length = self.every.interval(step, rate, facts)",
        "tests/local_updates/test_local_updates.py",
    ),
    Mutant(
        "moments that are not finite stay",
        "commpress/optim/inner_optimizers.py",
        (
            "            wild = [\n"
            "                p\n"
            "                for p, state in optimizer.state.items()\n"
            "                if torch.is_tensor(p) and not _finite(state)\n"
            "            ]"
        ),
        "            wild = []",
        "tests/local_updates/test_local_updates.py",
    ),
    Mutant(
        "a rank a step behind is a donor",
        "integrations/elastic/attendance.py",
        "in able.items() if each.steps == most}",
        "in able.items()}",
        "tests/elastic/test_elastic_loop.py",
    ),
    Mutant(
        "buffers of a step that failed are not put back",
        "integrations/elastic/repeat.py",
        "torch._foreach_copy_(self._buffers, self._kept)",
        "pass",
        "tests/elastic/test_elastic_loop.py",
    ),
    Mutant(
        "a repeated step draws other random numbers",
        "integrations/elastic/loop.py",
        ("        if self._again:\n            self._mark.draw_again()"),
        "",
        "tests/elastic/test_elastic_loop.py",
    ),
    Mutant(
        "a snapshot without agreement",
        "integrations/elastic/loop.py",
        'leaves = self._asked(self.attendance.leaving and self.build is not None, "snapshot")',
        "leaves = self.attendance.leaving and self.build is not None",
        "tests/elastic/test_elastic_loop.py",
    ),
    Mutant(
        "snapshots of another run give way",
        "integrations/elastic/snapshots.py",
        "if self.last > step + self.every:",
        "if self.last > step + 2 * self.every:",
        "tests/elastic/test_elastic_snapshots.py",
    ),
    Mutant(
        "a position under another seed",
        "integrations/elastic/sampler.py",
        'for name in ("samples", "shuffle", "seed"):',
        'for name in ("samples", "shuffle"):',
        "tests/elastic/test_elastic_sampler.py",
    ),
    Mutant(
        "an epoch in doubt is adopted if any rank is ready",
        "collectives/transports/membership.py",
        "        if epoch.number > last.number and all(",
        "        if epoch.number > last.number and any(",
        "tests/transports/test_roster.py",
    ),
    Mutant(
        "who began to agree is not looked at",
        "collectives/transports/membership.py",
        "return all(place in dead and (place not in began or place in met) for place in lost)",
        "return all(place in dead for place in lost)",
        "tests/transports/test_roster.py",
    ),
    Mutant(
        "residuals of a change that is not finite are committed",
        "commpress/optim/local_updates.py",
        "settle(outcomes, taken=taken)",
        "settle(outcomes, taken=True)",
        "tests/local_updates/test_local_updates.py",
    ),
    Mutant(
        "gradients leave by the forward codec",
        "integrations/pipeline/edges.py",
        "wanted = gradient_codec if gradient else codec",
        "wanted = codec",
        "tests/pipeline/test_pipeline_edges.py",
    ),
    Mutant(
        "a step in doubt is discarded by who did not finish it",
        "collectives/handover.py",
        "            workspace.settle(taken=taken)\n",
        "            workspace.settle(taken=False)\n",
        "tests/state/test_laws.py -k before_it_or_after_it",
    ),
    Mutant(
        "a change of ranks that others have finished is made again",
        "collectives/handover.py",
        "        if proposed is not None and proposed[0] == top:",
        "        if False:",
        "tests/collectives/test_handover.py",
    ),
    Mutant(
        "residuals keep their size among fewer ranks",
        "collectives/handover.py",
        "sent.mul_(change.size / before)",
        "sent.mul_(1.0)",
        "tests/state/test_laws.py -k leaves",
    ),
    Mutant(
        "who leaves takes along what it has handed over",
        "collectives/handover.py",
        "            if leaves:\n                for store in stores.values():",
        "            if False:\n                for store in stores.values():",
        "tests/state/test_laws.py -k leaves",
    ),
    Mutant(
        "who is new counts as a rank that was there, where nothing is settled yet",
        "collectives/handover.py",
        "        elif self.settled in (top, NEW):",
        "        elif self.settled == top:",
        "tests/state/test_laws.py -k who_is_new",
    ),
    Mutant(
        "bases stay behind when ranks change",
        "collectives/state.py",
        "given = standing.tensors.items() if standing.behind else ()",
        "given = ()",
        "tests/state/test_laws.py -k matrices",
    ),
    Mutant(
        "who is behind keeps its own momentum",
        "collectives/state.py",
        '            mine.copy_(standing.tensors[f"copy {name}"])\n',
        "            pass\n",
        "tests/state/test_laws.py -k toy",
    ),
    Mutant(
        "a schedule stays behind when ranks change",
        "collectives/state.py",
        '        self.steps_done = standing.shared["step"]\n',
        "        pass\n",
        "tests/state/test_laws.py -k mean",
    ),
    Mutant(
        "a state of another object is taken",
        "collectives/state.py",
        '        if (there := state.get("object", here)) != here:',
        "        if False:",
        "tests/state/test_laws.py -k of_another_class",
    ),
    Mutant(
        "copies of a state come late",
        "collectives/state.py",
        '            mine.copy_(state["copies"][name])\n',
        "            pass\n",
        "tests/state/test_laws.py -k toy",
    ),
    Mutant(
        "a round of values that are not finite is kept",
        "collectives/state.py",
        "        settle(outcomes, taken=taken)",
        "        settle(outcomes, taken=True)",
        "tests/state/test_laws.py -k not_finite",
    ),
    Mutant(
        "bases that were learnt since stay when a state is loaded",
        "collectives/exchange.py",
        "        if since := self.bases.keys() - saved.keys():",
        "        if since := set():",
        "tests/state/test_laws.py -k before_anything",
    ),
    Mutant(
        "residuals of gradients stay what they are when a warm-up ended elsewhere",
        "commpress/optim/onebit_adam.py",
        "            late.scale(self._flat.names[i], self._share(i), self.channel.rank)",
        "            pass",
        "tests/state/test_laws.py -k before_it_or_after_it",
    ),
    Mutant(
        "a step of the warm-up that was averaged before a load counts as averaged",
        "commpress/optim/local_updates.py",
        "        self._decayed = self._warmup.averaged = -1",
        "        self._decayed = -1",
        "tests/state/test_laws.py -k warm-up",
    ),
    Mutant(
        "who joins in a warm-up begins at the first weights",
        "commpress/optim/local_updates.py",
        "        self.facts.paces = []\n        if self.warms_up:",
        "        self.facts.paces = []\n        if False:",
        "tests/state/test_laws.py -k warm-up",
    ),
    Mutant(
        "a mean under way is not loaded",
        "commpress/optim/local_checkpoint.py",
        '        fragment.work.copy_(flight["mean"])\n',
        "",
        "tests/state/test_laws.py -k overlap",
    ),
    Mutant(
        "the outer state is not loaded",
        "commpress/optim/local_checkpoint.py",
        "            fragment.state.update(_copied(outer))\n",
        "",
        "tests/state/test_laws.py -k fragments",
    ),
    Mutant(
        "an elastic state of local updates owes nothing",
        "commpress/optim/local_checkpoint.py",
        "                fragment.work[starts[name] + offset :][: part.numel()] += part",
        "                pass",
        "tests/state/test_laws.py -k another_number",
    ),
    Mutant(
        "what waits in a window stays behind",
        "collectives/state.py",
        "state = self.common() | means if channel.rank == 0",
        "state = self.common() if channel.rank == 0",
        "tests/state/test_laws.py -k another_number",
    ),
    Mutant(
        "what lies on one rank alone is not loaded",
        "commpress/optim/optimizer.py",
        '            self.experts.load(schedule["own"])\n',
        "            pass\n",
        "tests/state/test_laws.py -k resumes",
    ),
    Mutant(
        "all ranks take the state of the first",
        "collectives/state.py",
        "        states = own or states\n",
        "",
        "tests/state/test_laws.py -k resumes",
    ),
    Mutant(
        "a part of a rank's state may be missing",
        "collectives/residual_state.py",
        "    for state in states:\n        _check_whole(state)",
        "",
        "tests/state/test_laws.py -k fit",
    ),
    Mutant(
        "reduced residuals of any length are taken",
        "collectives/residual_state.py",
        "    if lengths is None:\n        check_widths(residuals, size)",
        "",
        "tests/state/test_laws.py -k fit",
    ),
    Mutant(
        "the shared state of other fragments is taken",
        "commpress/optim/local_checkpoint.py",
        "    _check_shared(local, state)\n",
        "",
        "tests/state/test_laws.py -k fit",
    ),
    Mutant(
        "a state of an optimizer from before stays as it was",
        "commpress/optim/checkpoint.py",
        "    return rest | inner | (",
        "    return rest | (",
        "tests/state/test_earlier_states.py -k Adam",
    ),
    Mutant(
        "a state of local updates from before stays as it was",
        "commpress/optim/local_checkpoint.py",
        '        return state | state["residuals"] | state["choices"]\n',
        "        return state\n",
        "tests/state/test_earlier_states.py -k local",
    ),
    Mutant(
        "the state of another rank alone is refused",
        "collectives/state.py",
        "        if self.alone and not own and len(states) == 1:",
        "        if False:",
        "tests/optim/test_optim_checkpoints.py -k another_rank",
    ),
    Mutant(
        "rows that are missing are taken for zeros",
        "commpress/optim/checkpoint.py",
        "        if there != owned.numel:",
        "        if False:",
        "tests/optim/test_optim_checkpoints.py -k missing",
    ),
    Mutant(
        "the pause of an alarm never doubles",
        "commpress/alarm.py",
        "self._length = min(2 * self._length, LONGEST)",
        "pass",
        "tests/ddp/test_alarm.py -k pause",
    ),
    Mutant(
        "calm makes no pause of an alarm short again",
        "commpress/alarm.py",
        "            if self._calm >= CALM:",
        "            if False:",
        "tests/ddp/test_alarm.py -k pause",
    ),
    Mutant(
        "an alarm judges before enough is known",
        "commpress/alarm.py",
        "for name, values in self._usual.items() if len(values) >= FEWEST",
        "for name, values in self._usual.items()",
        "tests/ddp/test_alarm.py -k each_sign",
    ),
    Mutant(
        "a loss is held to its best, not to its trend",
        "commpress/alarm.py",
        "expected = max(mean + slope * (count - middle), min(values))",
        "expected = min(values)",
        "tests/ddp/test_alarm.py -k noise",
    ),
    Mutant(
        "what is usual to an alarm is not loaded",
        "commpress/alarm.py",
        'str(name): [float(value) for value in values] for name, values in state["usual"].items()',
        'str(name): [] for name, values in state["usual"].items()',
        "tests/ddp/test_alarm.py -k state_goes_on",
    ),
    Mutant(
        "Nesterov's step leaves the change of the round out",
        "commpress/optim/outer.py",
        "weights.sub_(change.add_(m, alpha=self.momentum), alpha=self.lr)",
        "weights.sub_(m, alpha=self.lr)",
        "tests/local_updates/test_local_updates.py -k equations",
    ),
    Mutant(
        "slow momentum forgets the inner rate",
        "commpress/optim/outer.py",
        "add_(change, alpha=1.0 / lr)",
        "add_(change)",
        "tests/local_updates/test_local_updates.py -k equations",
    ),
    Mutant(
        "the spread of ranks is nothing",
        "commpress/optim/outer.py",
        "return sqrt(max(around, 0.0) / mean) if mean > 0 else 0.0",
        "return 0.0",
        "tests/local_updates/test_local_updates.py -k spread",
    ),
    Mutant(
        "SparseLoCo has no outer rate",
        "commpress/optim/outer.py",
        "weights.sub_(change.mul_(self.lr))",
        "weights.sub_(change)",
        "tests/local_updates/test_sparse_loco.py -k equations",
    ),
    Mutant(
        "gossip has no outer rate",
        "commpress/optim/outer.py",
        'weights.sub_(state["momentum"].mul_(self.momentum).add_(change, alpha=self.lr))',
        'weights.sub_(state["momentum"].mul_(self.momentum).add_(change))',
        "tests/local_updates/test_local_policies.py -k gossip",
    ),
    Mutant(
        "a change without a share is in the mean",
        "commpress/optim/outer.py",
        "        if share == 0:",
        "        if False:",
        "tests/local_updates/test_local_updates.py -k finite",
    ),
    Mutant(
        "partners of gossip are the neighbours",
        "collectives/pairwise.py",
        "        order[last], order[other] = order[other], order[last]",
        "        pass",
        "tests/local_updates/test_local_policies.py -k partners",
    ),
    Mutant(
        "a gossip partner without a share counts",
        "collectives/pairwise.py",
        "        if shares[me] == 0:",
        "        if False:",
        "tests/local_updates/test_local_policies.py -k gossip",
    ),
    Mutant(
        "a sparse residual keeps what was sent",
        "collectives/all_gather_mean.py",
        "torch.sub(values, code.decode(row, x.numel()), out=new)",
        "new.copy_(values)",
        "tests/local_updates/test_sparse_loco.py",
    ),
    Mutant(
        "an epoch ends behind its last sample",
        "integrations/elastic/sampler.py",
        "return ((self.epoch + 1) * self.samples - self.position) // self.window",
        "return -((self.position - (self.epoch + 1) * self.samples) // self.window)",
        "tests/elastic/test_elastic_sampler.py",
    ),
    Mutant(
        "all ranks read the first one's samples",
        "integrations/elastic/sampler.py",
        "first = self.position + self.rank * self.batch_size",
        "first = self.position",
        "tests/elastic/test_elastic_sampler.py",
    ),
    Mutant(
        "every epoch has the same order",
        "integrations/elastic/sampler.py",
        "self.seed * 1_000_003 + epoch",
        "self.seed * 1_000_003",
        "tests/elastic/test_elastic_sampler.py",
    ),
    Mutant(
        "samples left out at the end of an epoch are not counted",
        "integrations/elastic/sampler.py",
        "                self.dropped += self.epoch * self.samples - self.position\n",
        "",
        "tests/elastic/test_elastic_sampler.py",
    ),
    Mutant(
        "after a change a sampler reads as the rank that it was",
        "integrations/elastic/sampler.py",
        "self.rank, self.size = change.rank, change.size",
        "self.size = change.size",
        "tests/elastic/test_elastic_sampler.py",
    ),
    Mutant(
        "batches that were read ahead are trained on after a change",
        "integrations/elastic/sampler.py",
        "        self._iterator, self._left = None, 0",
        "        pass",
        "tests/elastic/test_elastic_sampler.py tests/elastic/test_elastic_loop.py",
    ),
    Mutant(
        "SLURM's repeated counts count once",
        "collectives/topology.py",
        "counts += [int(match[1])] * int(match[2] or 1)",
        "counts += [int(match[1])]",
        "tests/collectives/test_topology.py",
    ),
    Mutant(
        "ranks with other nodes agree",
        "collectives/topology.py",
        '        if odd and (what == "source" or places[0].source == GIVEN):',
        "        if False:",
        "tests/collectives/test_topology.py",
    ),
    Mutant(
        "two nodes of one name are one",
        "collectives/topology.py",
        "len(set(locals_)) < len(locals_) or len(sizes) > 1 or 0 <= min(sizes) < len(ranks):",
        "False:",
        "tests/collectives/test_topology.py",
    ),
    Mutant(
        "a mean gradient is not clipped",
        "commpress/optim/optimizer.py",
        "        self.mean.mul_(self._factor(norm))",
        "        self._factor(norm)",
        "tests/optim/test_held.py -k clips",
    ),
    Mutant(
        "a clipped norm leaves experts out",
        "commpress/optim/optimizer.py",
        "whole = (norm * norm + self.expert_squares) ** 0.5 if isfinite(norm) else norm",
        "whole = norm",
        "tests/optim/test_held.py -k clips",
    ),
    Mutant(
        "a coarser codec that gains nothing is chosen",
        "commpress/choice.py",
        "if medians[method] * (1 - MARGIN) <= best",
        "if medians[method] <= best",
        "tests/ddp/test_codec_choice.py -k coarser",
    ),
    Mutant(
        "a codec that fell behind once leaves",
        "commpress/choice.py",
        "        if self.late < PATIENCE:",
        "        if self.late < 1:",
        "tests/ddp/test_codec_choice.py -k low_rank",
    ),
    Mutant(
        "codecs of layers are not loaded",
        "commpress/choice.py",
        '        rules = state.get("rules", {})',
        "        rules = {}",
        "tests/ddp/test_codec_choice.py -k resumed",
    ),
    Mutant(
        "two reads share the disk's time",
        "tiered_mem/schedule.py",
        "latest = min(latest, times[i]) - EARLY * reads[i]",
        "latest = times[i] - EARLY * reads[i]",
        "tests/store/test_store_schedule.py",
    ),
    Mutant(
        "packs with holes stay",
        "tiered_mem/packs.py",
        "            if sum(holes[b] for b in worst) * 40 <= total:",
        "            if True:",
        "tests/store/test_store_budgets.py tests/store/test_store.py",
    ),
    Mutant(
        "one member of a node speaks with all others",
        "collectives/all_to_all/routes.py",
        "return members[self.members[self.home[rank]].index(rank) % len(members)]",
        "return members[0]",
        "tests/collectives/test_all_to_all.py",
    ),
    Mutant(
        "copies of an expert share a node",
        "integrations/experts/expert_copies.py",
        "key=lambda r: (nodes.home[r] in taken, level[r], r)",
        "key=lambda r: (level[r], r)",
        "tests/experts/test_expert_copies.py",
    ),
    Mutant(
        "far tokens go to all copies alike",
        "integrations/experts/expert_copies.py",
        "    return np.maximum(height - level, 0)",
        "    return np.full(len(level), amount / len(level))",
        "tests/experts/test_expert_copies.py -k far",
    ),
    Mutant(
        "a backward takes experts in the order of its forward",
        "integrations/experts/tier_plan.py",
        'Phase("backward", p.layer, p.experts[::-1])',
        'Phase("backward", p.layer, p.experts)',
        "tests/experts/test_expert_tiers.py -k belady",
    ),
    Mutant(
        "messages of edges count as tensors",
        "integrations/pipeline/edges.py",
        "counters.sent_bytes += exact_bytes(message)",
        "counters.sent_bytes += exact_bytes(tensor)",
        "tests/pipeline/test_pipeline_edges.py",
    ),
    Mutant(
        "a rank decides by its own vote",
        "collectives/agreement.py",
        "        return bool(every.all())",
        "        return finite",
        "tests/ddp/test_agree_over.py",
    ),
    Mutant(
        "the step of a state is not loaded",
        "collectives/state.py",
        '        self.steps_done = int(state["step"])\n',
        "        pass\n",
        "tests/state/test_real_ranks.py -k hook",
    ),
    Mutant(
        "a hook goes on from its own step",
        "integrations/ddp/hook.py",
        "        self.step = self.steps_done\n",
        "        pass\n",
        "tests/state/test_real_ranks.py -k hook",
    ),
    Mutant(
        "a hook does not follow the state that it loads",
        "collectives/state.py",
        "        self.follow(state)\n",
        "        pass\n",
        "tests/state/test_real_ranks.py -k hook",
    ),
    Mutant(
        "the residuals of a state are not loaded",
        "collectives/state.py",
        "            each.load(saved.residuals[name])\n",
        "            pass\n",
        "tests/state/test_real_ranks.py -k hook",
    ),
    Mutant(
        "exchanges stay cut for the ranks that were",
        "collectives/state.py",
        "                each.reform(self.channel.size)\n",
        "                pass\n",
        "tests/state/test_real_ranks.py -k hook",
    ),
    Mutant(
        "averages of replicas draw anew after a state was loaded",
        "integrations/fsdp/hsdp.py",
        "            average.calls = self.steps_done\n",
        "            pass\n",
        "tests/state/test_real_ranks.py -k HSDP",
    ),
    Mutant(
        "FSDP2 owes the sum of what ranks owed",
        "integrations/fsdp/shard_checkpoint.py",
        "            means[name] = whole / size",
        "            means[name] = whole",
        "tests/state/test_real_ranks.py -k FSDP2",
    ),
    Mutant(
        "residuals of ZeRO are not loaded",
        "integrations/zero/partitioned.py",
        "        self.residuals.load(residuals)\n",
        "",
        "tests/state/test_real_ranks.py -k Partitioned",
    ),
    Mutant(
        "bases of ZeRO are not loaded",
        "integrations/zero/partitioned.py",
        "        self.exchanges.load_choices(state_dict)\n",
        "",
        "tests/state/test_real_ranks.py -k Partitioned",
    ),
    Mutant(
        "residuals of a group's calls are not loaded",
        "integrations/process_group/reducer.py",
        "            residuals=self.exchanges.residuals,\n",
        "",
        "tests/state/test_real_ranks.py -k group",
    ),
    Mutant(
        "rows of a group's reduce-scatters are not loaded",
        "integrations/process_group/reducer.py",
        'self._scattered.load(schedule["rows"])',
        "pass",
        "tests/process_group/test_group_collectives.py -k saved",
    ),
    Mutant(
        "gradients of a backward that failed count as those of the next",
        "commpress/optim/backward.py",
        "            arrived.clear()\n",
        "            pass\n",
        "tests/zero/test_partitioned.py -k nothing_behind",
    ),
    Mutant(
        "a store's commit counts no steps",
        "integrations/zero/stored_state.py",
        "self.steps_done = int(numbers[2])",
        "self.steps_done = 0",
        "tests/zero/test_offloaded.py",
    ),
    Mutant(
        "what a group has called is not loaded",
        "integrations/process_group/reducer.py",
        'self._calls = dict(schedule["calls"])',
        "self._calls = {}",
        "tests/state/test_real_ranks.py -k group",
    ),
    Mutant(
        "bytes that changed in a donor's memory are loaded",
        "integrations/elastic/healing.py",
        "        if came != right:",
        "        if False:",
        "tests/elastic/test_elastic_healing.py",
    ),
    Mutant(
        "the last donor's document counts",
        "integrations/elastic/healing.py",
        "first, me, ranks = checksum_of(document), min(donors)",
        "first, me, ranks = checksum_of(document), max(donors)",
        "tests/elastic/test_elastic_healing.py",
    ),
    Mutant(
        "any donor gives a tensor in which donors differ",
        "integrations/elastic/healing.py",
        "if int(every[d][i]) == right[i]) for i",
        "if True) for i",
        "tests/elastic/test_elastic_healing.py",
    ),
    Mutant(
        "all ranks count in a warm-up, also whose gradients are not finite",
        "commpress/optim/rounds.py",
        "            if grad is None or not finite:",
        "            if grad is None:",
        "tests/local_updates/test_local_policies.py -k warm",
    ),
    Mutant(
        "the mean of a warm-up is that of all ranks, whoever is left out",
        "commpress/optim/rounds.py",
        "share=len(heads) / count if count else 0.0",
        "share=1.0",
        "tests/local_updates/test_local_policies.py -k warm",
    ),
    Mutant(
        "ranks warm up from different weights",
        "commpress/optim/rounds.py",
        "        if different:",
        "        if False:",
        "tests/local_updates/test_local_policies.py -k warm",
    ),
    Mutant(
        "a parameter without a gradient on all ranks gets one in a warm-up",
        "commpress/optim/rounds.py",
        "            if any_\n",
        "",
        "tests/local_updates/test_local_policies.py -k warm",
    ),
    Mutant(
        "a fragment leaves a step late",
        "commpress/optim/rounds.py",
        "self._elapsed(step - self.start) >= self._turn",
        "self._elapsed(step - self.start) > self._turn",
        "tests/local_updates/test_local_updates.py -k equations",
    ),
    Mutant(
        "fragments leave together",
        "commpress/optim/rounds.py",
        "share = (self.next + 1) / self.fragments",
        "share = 1.0",
        "tests/local_updates/test_local_updates.py",
    ),
    Mutant(
        "the standing of a step counts as computing",
        "commpress/optim/rounds.py",
        "            self._computing += start - self._resumed\n",
        "            self._computing += 2 * (start - self._resumed)\n",
        "tests/local_updates/test_hidden_rounds.py",
    ),
    Mutant(
        "states of two checkpoints are loaded together",
        "collectives/residual_state.py",
        '    if any((s["kind"], s["size"]) != (first["kind"], first["size"]) for s in states):',
        "    if False:",
        "tests/ddp/test_resume.py -k belong",
    ),
    Mutant(
        "a state of other nodes is loaded",
        "collectives/residual_state.py",
        '    if first.get("nodes", "") != nodes:',
        "    if False:",
        "tests/ddp/test_ddp_hierarchy.py -k topology",
    ),
    Mutant(
        "what ranks owe is added up, not averaged",
        "collectives/residual_state.py",
        "totals[key_of(text)] = torch.stack(parts).mean(0)",
        "totals[key_of(text)] = torch.stack(parts).sum(0)",
        "tests/state/test_laws.py -k another_number",
    ),
    Mutant(
        "older snapshots stay",
        "integrations/elastic/snapshots.py",
        "        for old in self.steps[: -self.keep]:",
        "        for old in ():",
        "tests/elastic/test_elastic_snapshots.py",
    ),
    Mutant(
        "a snapshot of fewer tensors keeps the others",
        "integrations/elastic/snapshots.py",
        "            for name in [name for name in self.store if _number(name) >= len(tensors)]:",
        "            for name in ():",
        "tests/elastic/test_elastic_snapshots.py -k fewer",
    ),
    Mutant(
        "lazy residuals keep their scale when they are plain",
        "commpress/feedback.py",
        "            self.sent_scale.zero_()\n            self.reduced_scale.zero_()",
        "            pass",
        "tests/codecs/test_feedback.py",
    ),
    Mutant(
        "a whole tensor's reduced residual counts twice",
        "commpress/feedback.py",
        "            reduced.zero_()\n        self.joined = True",
        "        self.joined = True",
        "tests/codecs/test_feedback.py tests/codecs/test_low_rank.py",
    ),
    Mutant(
        "a checkpoint of other ranks is loaded as one's own",
        "integrations/trainers/distributed_checkpoint.py",
        "    elif saved != size:",
        "    elif False:",
        "tests/optim/test_optim_gloo.py -k continue",
    ),
    Mutant(
        "a partial state of FSDP2 is begun to load",
        "integrations/fsdp/shard_checkpoint.py",
        '    check_entries(saved, _EXACT if kind == "exact" else (), "the state")\n',
        "",
        "tests/state/test_real_ranks.py -k FSDP2",
    ),
    Mutant(
        "a changed tensor is used in a backward",
        "integrations/zero/activation_tier.py",
        "        saved.check()",
        "        pass",
        "tests/zero/test_activations.py -k in_place",
    ),
    Mutant(
        "a storage is kept once for each tensor of it",
        "integrations/zero/activation_tier.py",
        "storage = self._storages.get(key) or self._keep_storage(tensor, key)",
        "storage = self._keep_storage(tensor, key)",
        "tests/zero/test_activations.py -k kept_once",
    ),
    Mutant(
        "an older version of a storage is used for a newer one",
        "integrations/zero/activation_tier.py",
        "key = (tensor.untyped_storage()._cdata, version)",
        "key = (tensor.untyped_storage()._cdata, 0)",
        "tests/zero/test_activations.py -k after_a_change",
    ),
    Mutant(
        "a forward outruns the disk",
        "integrations/zero/activation_tier.py",
        "while self._bytes > self._budget and self._due:",
        "while False:",
        "tests/zero/test_activations.py -k slow_tier",
    ),
    Mutant(
        "nothing is read in advance",
        "integrations/zero/activation_tier.py",
        "self._jobs.put(partial(self._read_early, before))",
        "pass",
        "tests/zero/test_activations.py -k background",
    ),
    Mutant(
        "places of a used graph are not given back",
        "integrations/zero/activation_tier.py",
        "                self._tier.delete(kept.name)",
        "                pass",
        "tests/zero/test_activations.py -k leave_memory",
    ),
    Mutant(
        "a retained graph keeps all that it has read",
        "integrations/zero/activation_tier.py",
        "            self._uncount(self._returned.pop(kept.number))",
        "            pass",
        "tests/zero/test_activations.py -k used_again",
    ),
    Mutant(
        "parameters leave",
        "integrations/zero/activation_tier.py",
        "            and not isinstance(base, nn.Parameter)\n",
        "",
        "tests/zero/test_activations.py -k parameters",
    ),
    Mutant(
        "what a checkpoint computes again leaves",
        "integrations/zero/activation_tier.py",
        "torch._C._current_graph_task_id() < 0",
        "True",
        "tests/zero/test_activations.py -k boundaries",
    ),
    Mutant(
        "random numbers of a block are drawn anew",
        "integrations/zero/vertical.py",
        "            self._turns.set_random(call.random)\n",
        "",
        "tests/zero/test_vertical.py -k random_numbers",
    ),
    Mutant(
        "only the last use of a block's input counts",
        "integrations/zero/vertical.py",
        "                    wanted[0] = leaf.grad if wanted[0] is None else wanted[0] + leaf.grad",
        "                    wanted[0] = leaf.grad",
        "tests/zero/test_vertical.py -k random_numbers",
    ),
    Mutant(
        "gradients go on before all uses are known",
        "integrations/zero/vertical.py",
        "            if first is call:",
        "            if gradient is not None:",
        "tests/zero/test_vertical.py -k random_numbers",
    ),
    Mutant(
        "a cache of keys is passed on",
        "integrations/zero/vertical.py",
        "        if [*contents(arguments)] != call.given:",
        "        if False:",
        "tests/zero/test_vertical.py -k cannot_be_computed",
    ),
    Mutant(
        "an input changed in place is used",
        "integrations/zero/vertical.py",
        "            if values._version != self._version:",
        "            if False:",
        "tests/zero/test_vertical.py -k cannot_be_computed",
    ),
    Mutant(
        "a thread goes on beside the others",
        "integrations/zero/vertical.py",
        "            if not alone and any(not group.present for group in unit.groups):",
        "            if False:",
        "tests/zero/test_vertical.py -k read_twice",
    ),
    Mutant(
        "what was fetched does not stay",
        "integrations/zero/streamed.py",
        "            group.holders += 1\n            self._stay.callback(group.release)",
        "            pass",
        "tests/zero/test_vertical.py -k until_its_end",
    ),
    Mutant(
        "every micro-batch moves its gradients",
        "integrations/zero/vertical.py",
        "                        with self._streamed.holding_gradients(waiting[unit] > 0):",
        "                        with self._streamed.holding_gradients(False):",
        "tests/zero/test_vertical.py -k read_twice",
    ),
    Mutant(
        "a bucket is sent at the end of each backward",
        "integrations/zero/gradients.py",
        "        self._ending = weakref.ref(ending)\n",
        "",
        "tests/zero/test_vertical.py -k over_ranks",
    ),
    Mutant(
        "running statistics count each micro-batch twice",
        "integrations/zero/vertical.py",
        "            buffers[own] = value.clone()\n",
        "            pass\n",
        "tests/zero/test_vertical.py -k running_statistics",
    ),
    Mutant(
        "an interrupted forward holds its blocks",
        "integrations/zero/streamed_module.py",
        "        self._forwards = 0\n        self._update()",
        "        pass",
        "tests/zero/test_vertical.py -k after_an_error",
    ),
    Mutant(
        "only norms of results are compared",
        "integrations/zero/vertical.py",
        "self._weights[key].dot(flat)",
        "flat.norm()",
        "tests/zero/test_vertical.py -k cannot_be_computed",
    ),
    Mutant(
        "autocast keeps a copy of every block's weights",
        "integrations/zero/vertical.py",
        "        torch.set_autocast_cache_enabled(False)\n",
        "",
        "tests/zero/test_vertical.py -k autocast",
    ),
    Mutant(
        "the second gradient of a parameter replaces the first in its bucket",
        "integrations/zero/gradients.py",
        "        if self._stage == 1 or i not in self._arrived[b]:",
        "        if True:",
        "tests/zero/test_vertical.py -k no_part",
    ),
    Mutant(
        "a gradient that comes after its bucket stays behind",
        "integrations/zero/gradients.py",
        "        if self._again:\n            super().finish()",
        "        if self._again:\n            pass",
        "tests/zero/test_vertical.py -k no_part",
    ),
    Mutant(
        "sums of half precision are rounded each time",
        "integrations/zero/update_chunk.py",
        "self._held[parameter] = gradient.float()",
        "self._held[parameter] = gradient",
        "tests/zero/test_vertical.py -k half_precision",
    ),
    Mutant(
        "a frozen block with an adapter leaves before its backward",
        "integrations/zero/streamed_module.py",
        "        if call.inputs > 0 or (not self._missing and self._trains_others()):",
        "        if call.inputs > 0:",
        "tests/zero/test_vertical.py -k adapter",
    ),
    Mutant(
        "a forward takes values that are not up to date",
        "integrations/zero/streamed_group.py",
        "            sweep.wait([one.name for one in self.stored])",
        "            pass",
        "tests/zero/test_sweep.py -k forward",
    ),
    Mutant(
        "a state is read while it is updated",
        "integrations/zero/stored_state.py",
        "    def __contains__(self, parameter: object) -> bool:\n        self._settle()\n",
        "    def __contains__(self, parameter: object) -> bool:\n",
        "tests/zero/test_sweep.py -k who_reads",
    ),
    Mutant(
        "half of an update is committed",
        "tiered_mem/store.py",
        "        self._settle()\n        self._packs.repack()",
        "        self._packs.repack()",
        "tests/zero/test_sweep.py -k who_reads",
    ),
    Mutant(
        "zero_grad deletes the gradients of the running update",
        "integrations/zero/update_chunk.py",
        "        self._used, self._there = self._there, {}",
        "        self._used = self._there",
        "tests/zero/test_sweep.py -k forward",
    ),
    Mutant(
        "an update in backward begins before the last one of the step before",
        "integrations/zero/offloaded.py",
        '        before."""\n        self.finish()\n',
        '        before."""\n',
        "tests/zero/test_sweep.py -k after_the_last_step",
    ),
    Mutant(
        "tied parameters are updated by a part of their gradient",
        "integrations/zero/offloaded.py",
        "group is None or group.shared or",
        "group is None or",
        "tests/zero/test_sweep.py -k equal_those",
    ),
    Mutant(
        "a chunk that was updated in backward is updated again",
        "integrations/zero/offloaded.py",
        "[chunk for chunk in self.chunks if chunk not in updated]",
        "self.chunks",
        "tests/zero/test_sweep.py -k equal_those",
    ),
    Mutant(
        "a step that is half done is committed",
        "integrations/zero/offloaded.py",
        "        if self._early is not None and self._early.begun:\n            raise",
        "        if False:\n            raise",
        "tests/zero/test_sweep.py -k commit_between",
    ),
    Mutant(
        "the error of an update is raised once",
        "integrations/zero/offloaded.py",
        "        running.finish()\n        if",
        "        self._running = None\n        running.finish()\n        if",
        "tests/zero/test_sweep.py -k half_an_update",
    ),
    Mutant(
        "a block waits for its newest update alone",
        "integrations/zero/streamed_group.py",
        "[sweep, *(one for one in self._sweeps if not one.has(names))]",
        "[sweep]",
        "tests/zero/test_sweep.py -k two_optimizers",
    ),
    Mutant(
        "a step takes the rate of the next one from a tensor",
        "integrations/zero/offloaded.py",
        "{key: copied(value) for key, value in options_of(group).items()}",
        "options_of(group)",
        "tests/zero/test_sweep.py -k rate_in_a_tensor",
    ),
    Mutant(
        "a second backward before step is taken",
        "integrations/zero/backward_updates.py",
        "        if self._chunks:\n            self._refuse",
        "        if False:\n            self._refuse",
        "tests/zero/test_sweep.py -k second_backward",
    ),
    Mutant(
        "what another thread uses is evicted or refused",
        "tiered_mem/access.py",
        "            blocks = [block for block in blocks if not block.used]",
        "            assert not any(block.used for block in blocks)",
        "tests/store/test_store.py -k another_thread",
    ),
    Mutant(
        "a read in advance that lags brings back what was used and evicted",
        "tiered_mem/access.py",
        "block.damage or self.background.closed\n",
        "block.damage or self.background.closed\n                    borrows = block.borrows\n",
        "tests/store/test_store_threads.py -k comes_after_the_use",
    ),
    Mutant(
        "an update that failed counts as done",
        "integrations/zero/sweep.py",
        "            if not self.has(names):",
        "            if False:",
        "tests/zero/test_sweep.py -k error",
    ),
    Mutant(
        "pieces of an interrupted write count as those of the checkpoint",
        "integrations/zero/parked_state.py",
        "        self._commit = max(self.places.values(), default=0) + 1",
        "        self._commit = max(self.places.values(), default=1)",
        "tests/zero/test_parking.py -k interrupted",
    ),
    Mutant(
        "two use one store at a time",
        "integrations/zero/parking.py",
        "isinstance(self._where, TieredStore) and other._where is self._where",
        "False",
        "tests/zero/test_parking.py -k others_that_are_away",
    ),
    Mutant(
        "pieces of what is gone stay in the store",
        "integrations/zero/parked_state.py",
        "                self.store.delete(name)",
        "                pass",
        "tests/zero/test_parking.py -k not_written_again",
    ),
    Mutant(
        "a parameter is rounded from a master that differs in its last element",
        "integrations/zero/parked_state.py",
        "in zip(starts, ends, strict=True)",
        "in list(zip(starts, ends, strict=True))[:1]",
        "tests/zero/test_parking.py -k half",
    ),
    Mutant(
        "parked memory is not freed",
        "integrations/zero/parked_state.py",
        "return advise(self.storage, mmap.MADV_DONTNEED, mmap.PAGESIZE)",
        "return True",
        "tests/zero/test_parking.py -k memory_is_free",
    ),
    Mutant(
        "a tensor of a checkpoint reaches beyond its storage",
        "integrations/zero/parked_state.py",
        "if end * DTYPES[dtype].itemsize > self.storages[storage][0]:",
        "if False:",
        "tests/zero/test_parking.py -k lies",
    ),
    Mutant(
        "a step does not wait for the state that returns",
        "integrations/zero/parking.py",
        "        self._check()\n        self.settle()\n        return state",
        "        self._check()\n        return state",
        "tests/zero/test_parking.py -k behind",
    ),
    Mutant(
        "an optimizer without state steps while its parameters are away",
        "integrations/zero/parking.py",
        "        _watch_steps()\n",
        "",
        "tests/zero/test_parking.py -k refused",
    ),
    Mutant(
        "shards are parked beside whole parameters that are out of date",
        "integrations/zero/parking.py",
        "                module.reshard()  # type: ignore[operator]",
        "                pass",
        "tests/zero/test_parking.py -k fsdp",
    ),
    Mutant(
        "a state of shards is loaded as plain tensors",
        "integrations/zero/parking.py",
        "entries[name] = alike(value.to(p.device), p)",
        "pass",
        "tests/zero/test_parking.py -k fsdp",
    ),
]


def copy(folder: Path) -> Path:
    """A checkout of its own whose imports resolve inside it; returns what goes on PYTHONPATH."""
    shutil.copytree(ROOT, folder, ignore=LEFT_OUT, symlinks=True)
    site = folder / "site"
    site.mkdir()
    (site / "commpress").symlink_to(Path("..", "commpress"))
    return site


def outcome(mutant: Mutant, folder: Path) -> str:
    """``killed``, or a word about why not. The file is as it was afterwards."""
    file = folder / mutant.file
    text = file.read_text()
    if text.count(mutant.line) != 1:
        return f"DOES NOT APPLY: {mutant.file} holds its line {text.count(mutant.line)} times"
    file.write_text(text.replace(mutant.line, mutant.becomes))
    environment = os.environ | {"PYTHONPATH": str(folder / "site"), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [
        sys.executable.replace("python3", "python"),
        "-c",
        "import pytest; raise SystemExit(pytest.console_main())",
    ]
    try:
        done = subprocess.run(
            [*command, "-x", "-q", "-p", "no:cacheprovider", *mutant.tests.split()],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=900,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "killed, by a hang"
    finally:
        file.write_text(text)
    if done.returncode == 1:
        return "killed"
    if done.returncode == 0:
        return "SURVIVES"
    return f"pytest ended with {done.returncode}: {done.stdout[-2000:]}{done.stderr[-1000:]}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "-k", default="", metavar="WORD", help="only mutants whose fault or file holds this word"
    )
    parser.add_argument(
        "--jobs",
        type=int,
        default=2,
        help="copies of the checkout, each with a mutant at a time (default 2)",
    )
    parser.add_argument(
        "--part", type=int, choices=range(1, PARTS + 1), help=f"every {PARTS}th mutant from this on"
    )
    options = parser.parse_args(arguments)
    dealt = MUTANTS[options.part - 1 :: PARTS] if options.part else MUTANTS
    chosen = [m for m in dealt if options.k in m.fault or options.k in m.file]
    survivors = 0
    with tempfile.TemporaryDirectory() as top, ThreadPoolExecutor(options.jobs) as pool:
        folders: SimpleQueue[Path] = SimpleQueue()
        for number in range(options.jobs):
            folders.put(copy(Path(top, str(number))).parent)

        def one(mutant: Mutant) -> str:
            folder = folders.get()
            try:
                return outcome(mutant, folder)
            finally:
                folders.put(folder)

        for mutant, verdict in zip(chosen, pool.map(one, chosen), strict=True):
            survivors += not verdict.startswith("killed")
            print(f"{verdict:10} {mutant.file}: {mutant.fault}", flush=True)
    print(f"{len(chosen) - survivors} of {len(chosen)} mutants killed")
    return 1 if survivors or not chosen else 0


if __name__ == "__main__":
    sys.exit(main())
