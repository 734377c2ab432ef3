"""Has the interpreter behind ``imported.py`` run a script with this process's streams, and ends as it ends."""

import json
import os
import resource
import signal
import socket
import sys

with socket.socket(socket.AF_UNIX) as connection:
    connection.connect(f"\0{sys.argv[1]}")
    request = {"argv": sys.argv[2:], "environ": dict(os.environ), "cwd": os.getcwd()}
    data = json.dumps(request).encode()
    connection.sendall(len(data).to_bytes(8, "big"))
    socket.send_fds(connection, [data[:1]], [0, 1, 2])
    connection.sendall(data[1:])
    status = int.from_bytes(connection.recv(4, socket.MSG_WAITALL), sys.byteorder)
    connection.recv(1)  # its end: the process that waited for the script is gone, too
code = os.waitstatus_to_exitcode(status)
if code < 0:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.kill(os.getpid(), signal.Signals(-code))
os._exit(code)
