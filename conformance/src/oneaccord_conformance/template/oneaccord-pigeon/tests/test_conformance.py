"""The backend keeps the contract of oneaccord: each check of the suite is one test."""

from oneaccord_conformance.pytest import BackendConformance


class TestConformance(BackendConformance):
    backend = "pigeon"
    quick = True  # fewer sizes and dtypes; `oneaccord check pigeon` tries all of them
