"""Several processes on the CPU that form one process group, as torchrun would start them on GPUs."""

import multiprocessing
import os
import pickle
import socket
import traceback
from contextlib import closing

PRELOAD = ["torch", "torch.distributed", "numpy", "contract.cases"]  # once, by the server that the processes fork from


def free_port() -> int:
    with closing(socket.socket()) as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    """What torchrun would set."""
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_PORT": port, "OMP_NUM_THREADS": 1}
    return {name: str(value) for name, value in numbers.items()} | {"MASTER_ADDR": "127.0.0.1"}


def _work(connection, variables, function, arguments) -> None:
    os.environ.update(variables)
    import torch

    from nearkin import ranks

    torch.set_num_threads(1)
    try:
        ranks.join()
        answer = function(*arguments)
        ranks.barrier()
        ranks.leave()
        # As bytes: tensors would be shared with a process that ends.
        connection.send_bytes(pickle.dumps((answer, "")))
    except BaseException:
        connection.send_bytes(pickle.dumps((None, traceback.format_exc())))


def on_ranks(count: int, function, *arguments, timeout: float = 120):
    """What a function of a module returns on each of `count` ranks; raises what went wrong on any."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    port, running = free_port(), []
    for rank in range(count):
        here, there = context.Pipe(duplex=False)
        process = context.Process(
            target=_work, args=(there, environment(rank, count, port), function, arguments), daemon=True
        )
        process.start()
        there.close()
        running.append((process, here))
    answers, errors = [], []
    for rank, (_, here) in enumerate(running):
        if not here.poll(timeout):
            errors.append(f"rank {rank} did not answer within {timeout} s")
        else:
            try:
                answer, error = pickle.loads(here.recv_bytes())
            except EOFError:
                answer, error = None, "it ended without an answer"
            answers.append(answer)
            errors += [f"rank {rank}: {error}"] if error else []
    for process, _ in running:
        process.join(1 if errors else timeout)
        process.kill()
    assert not errors, "\n".join(errors)
    return answers
