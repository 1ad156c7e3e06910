"""The backend keeps the contract of manyhands: each check of the suite is one test."""

from manyhands_conformance.pytest import BackendConformance


class TestConformance(BackendConformance):
    backend = "pigeon"
    quick = True  # fewer sizes and dtypes; `manyhands check pigeon` tries all of them
