"""What a rank looks at while it waits: the lines of its peers, those who connect, and a pipe by which it is woken."""

import os
import select

from commpress.integrations.process_group.control_connections import Lines

_HANGUP = select.POLLRDHUP if hasattr(select, "POLLRDHUP") else 0
Events = dict[int, int]  # by file descriptor


class Polls:
    """``everybody``: news from any peer. ``one[peer]``: from that one, or that another hung up. ``busy``, ``idle``: for the
    thread that watches, with and without the news."""

    def __init__(self, lines: Lines) -> None:
        self.wake, self._waker = os.pipe()
        os.set_blocking(self.wake, False)
        os.set_blocking(self._waker, False)
        self.door = lines.door.fileno()
        self.peers = {line.socket.fileno(): peer for peer, line in lines.lines.items()}  # whose lines are open
        self.everybody, self.idle, self.busy = select.poll(), select.poll(), select.poll()
        self.one = {peer: select.poll() for peer in lines.lines}
        for fd, peer in self.peers.items():
            self.everybody.register(fd, select.POLLIN)
            self.busy.register(fd, select.POLLIN)
            self.idle.register(fd, _HANGUP)
            for other, poll in self.one.items():
                poll.register(fd, select.POLLIN if other == peer else _HANGUP)
        for poll in (self.idle, self.busy):
            poll.register(self.wake, select.POLLIN)
            poll.register(self.door, select.POLLIN)

    def forget(self, fd: int) -> bool:
        """Look at this line no more; False if it was forgotten before."""
        peer = self.peers.pop(fd, None)
        if peer is None:
            return False
        for poll in (self.everybody, self.idle, self.busy, *self.one.values()):
            poll.unregister(fd)
        del self.one[peer]
        return True

    def nudge(self) -> None:
        """Wake who waits in ``idle`` or ``busy``."""
        try:
            os.write(self._waker, b"!")
        except BlockingIOError:  # it has been asked more often than it could look
            return

    def calm(self, events: Events) -> None:
        """The nudges have been heard."""
        if self.wake in events:
            while len(os.read(self.wake, 4096)) == 4096:
                pass

    def close(self) -> None:
        os.close(self.wake)
        os.close(self._waker)
