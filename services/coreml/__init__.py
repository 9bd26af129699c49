"""CoreML: conversion, packages, their execution. The only room that imports coremltools."""
