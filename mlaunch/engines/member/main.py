"""``python -m mlaunch.engines.member.main``: what an engine starts on each machine; ``member.py`` is what it does.

What a member imports takes a second, in which somebody may stop it, too. So who continues it comes first.
"""

from mlaunch.engines.member import waker

if __name__ == "__main__":
    waker.watch(0)
    from mlaunch.engines.member.member import main

    main()
