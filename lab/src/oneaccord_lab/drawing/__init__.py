"""Schedules as pictures: when each message goes in a world of equal links, and that as SVG or as text. Pure, like schedules."""
