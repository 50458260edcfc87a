"""A pause before timing on a processor, so that threads of the previous contender do not disturb."""

from time import process_time, sleep

NAP_S, MOST_NAPS, AWAKE_SHARE = 2e-3, 25, 0.1


def rest() -> None:
    """Wait until this process's threads sleep. PyTorch's, NumPy's and OpenCL's threads spin for milliseconds after an operation,
    waiting for the next one, and take the cores from whatever comes next.
    """
    for _ in range(MOST_NAPS):
        spent = process_time()
        sleep(NAP_S)
        if process_time() - spent < AWAKE_SHARE * NAP_S:
            return
