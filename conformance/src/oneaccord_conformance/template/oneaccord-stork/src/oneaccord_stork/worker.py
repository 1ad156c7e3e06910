"""The program of a worker: it runs the calls that come on its socket, each in a thread, until the program that has started it ends."""

import os
import pickle
import socket
import sys
import threading
from typing import Any


def main() -> None:
    """Serve the socket whose number is the first argument."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    connection.set_inheritable(False)  # what a rank starts must not keep it open
    sending = threading.Lock()

    def run(number: int, function: Any, args: tuple[Any, ...]) -> None:
        try:
            answer = pickle.dumps((number, True, function(*args)))
        except Exception as error:  # noqa: BLE001 - it is raised in the program
            answer = pickle.dumps((number, False, error))
        with sending:
            connection.sendall(answer)

    with connection.makefile("rb") as calls:
        try:
            while True:
                number, function, args = pickle.load(calls)  # noqa: S301 - from the program that has started this process
                threading.Thread(target=run, args=(number, function, args), daemon=True).start()
        except (OSError, EOFError):
            os._exit(0)  # the program has gone, and what runs here must not outlive it


if __name__ == "__main__":
    main()
