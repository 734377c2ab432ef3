"""The agent's part in a launch over several machines: it joins, and tells the other machines how its ranks end."""

from mlaunch.machines.agent.joining_machines import join_machines as join_machines
