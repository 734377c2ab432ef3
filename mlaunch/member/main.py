"""``python -m mlaunch.member.main``: what an engine starts on each machine; ``member.py`` says what it does there.

What a member imports takes a second, in which somebody may stop it, too. So who continues it comes first.
"""

from mlaunch.member import waker

if __name__ == "__main__":
    waker.watch(0)
    from mlaunch.member.member import main

    main()
