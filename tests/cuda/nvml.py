"""What tools ask NVML, through NVIDIA's own binding: each line holds on every device."""

import sys

import pynvml


def say(what, holds):
    print(f"{what}: {'yes' if holds else 'NO'}")


def refused(error, call, *arguments):
    try:
        call(*arguments)
    except pynvml.NVMLError as found:
        return found.value == error
    return False


pynvml.nvmlInit()
say("driver", pynvml.nvmlSystemGetDriverVersion().split(".")[0].isdigit())
say("CUDA", pynvml.nvmlSystemGetCudaDriverVersion() >= 12000)
count = pynvml.nvmlDeviceGetCount()
say("devices", count >= int(sys.argv[1]))
seen = set()
for index in range(count):
    device = pynvml.nvmlDeviceGetHandleByIndex(index)
    uuid, pci = pynvml.nvmlDeviceGetUUID(device), pynvml.nvmlDeviceGetPciInfo(device)
    seen |= {uuid, pci.busId}
    again = [pynvml.nvmlDeviceGetHandleByUUID(uuid), pynvml.nvmlDeviceGetHandleByPciBusId(pci.busId)]
    say("found again", [pynvml.nvmlDeviceGetIndex(it) for it in again] == [index, index])
    say("Hopper", pynvml.nvmlDeviceGetCudaComputeCapability(device) == (9, 0))
    say("name", "H100" in pynvml.nvmlDeviceGetName(device) or "H200" in pynvml.nvmlDeviceGetName(device))
    memory = pynvml.nvmlDeviceGetMemoryInfo(device)
    say("memory", memory.total > 60 << 30 and memory.used + memory.free <= memory.total)
    exact = pynvml.nvmlDeviceGetMemoryInfo(device, pynvml.nvmlMemory_v2)
    say("memory with what is reserved", exact.used + exact.free + exact.reserved == exact.total)
    partitioned = pynvml.nvmlDeviceGetMigMode(device)[0] == 1
    if not partitioned:
        rates = pynvml.nvmlDeviceGetUtilizationRates(device)
        say("rates", 0 <= rates.gpu <= 100)
    say("processes", isinstance(pynvml.nvmlDeviceGetComputeRunningProcesses(device), list))
    say("no MIG instance itself", pynvml.nvmlDeviceIsMigDeviceHandle(device).value == 0)
    instances = []
    for at in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(device)):
        try:
            instances.append(pynvml.nvmlDeviceGetMigDeviceHandleByIndex(device, at))
        except pynvml.NVMLError_NotFound:
            continue
    say("instances of what is partitioned only", partitioned or not instances)
    parts = 0
    for instance in instances:
        uuid = pynvml.nvmlDeviceGetUUID(instance)
        say("an instance", uuid.startswith("MIG-") and pynvml.nvmlDeviceIsMigDeviceHandle(instance).value == 1)
        say("its GPU", pynvml.nvmlDeviceGetIndex(pynvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(instance)) == index)
        again = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        numbers = [(pynvml.nvmlDeviceGetGpuInstanceId(it), pynvml.nvmlDeviceGetComputeInstanceId(it)) for it in (instance, again)]
        say("found again", numbers[0] == numbers[1])
        attributes = pynvml.nvmlDeviceGetAttributes(instance)
        say("processors", 0 < attributes.multiprocessorCount <= 132 and attributes.gpuInstanceSliceCount in range(1, 8))
        parts += pynvml.nvmlDeviceGetMemoryInfo(instance).total
    say("memory of its instances", parts <= memory.total)
say("all different", len(seen) == 2 * count)
say("no such index", refused(pynvml.NVML_ERROR_INVALID_ARGUMENT, pynvml.nvmlDeviceGetHandleByIndex, count))
say("no such UUID", refused(pynvml.NVML_ERROR_NOT_FOUND, pynvml.nvmlDeviceGetHandleByUUID, "GPU-00000000-0000-0000-0000-000000000000"))
pynvml.nvmlShutdown()
say("nothing after the end", refused(pynvml.NVML_ERROR_UNINITIALIZED, pynvml.nvmlDeviceGetCount))
print("done")
