"""Build the wheel: the trainer with the choices of conf/, and the passes; no tools, no tests."""

from setuptools import find_packages, setup

CONF, PAGE = "compiler_trainer.conf", "compiler_trainer.inspect"

setup(
    packages=[*find_packages(include=["compiler_trainer", "compiler_trainer.*", "passes", "passes.*"]), CONF],
    package_dir={CONF: "conf"},
    package_data={
        "compiler_trainer": ["look.css"],
        CONF: ["*.yaml", "*/*.yaml", "*/*/*.yaml"],
        PAGE: ["page/*"],
        "passes.lower": ["*.cpp"],
    },
)
