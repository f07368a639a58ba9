//! Graphs that are built node by node. What a node does is recorded as a capture records it.

use std::{
    ffi::{c_int, c_uint},
    sync::{Arc, Weak},
};

use gpumux_cuda::types::graph_node::{ALLOCATE, EMPTY, FREE, GRAPH, HOST, KERNEL, MEMCPY, MEMSET};
use gpumux_emu::protocol::Work;

use crate::{
    border::{Arguments, HostFunction, In, Out, Pointers, UserData, cuda, exports},
    effect::Effect,
    error::{CuError, Result},
    graph::{self, Added, EXECUTABLES, GRAPHS, Graph, NODES, in_order},
    launch, memory,
    op::Op,
    plane,
    process::{lock, process},
    stream,
};

type Handle = usize;

/// `CUDA_KERNEL_NODE_PARAMS`; version 2 has a kernel and a context behind.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct KernelParams {
    function: Handle,
    grid: [c_uint; 3],
    block: [c_uint; 3],
    shared: c_uint,
    pointers: Pointers,
    extra: Pointers,
}

/// `CUDA_KERNEL_NODE_PARAMS_v2`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct KernelParams2 {
    first: KernelParams,
    kernel: Handle,
    context: Handle,
}

/// `CUDA_MEMSET_NODE_PARAMS`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct MemsetParams {
    to: u64,
    pitch: usize,
    value: c_uint,
    size: c_uint,
    columns: usize,
    rows: usize,
}

/// `CUDA_HOST_NODE_PARAMS`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct HostParams {
    function: HostFunction,
    data: UserData,
}

/// `CUDA_MEM_ALLOC_NODE_PARAMS`: a pool's properties, access of devices, how much, and where it is.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct AllocParams {
    kind: c_int,
    handles: c_int,
    location: c_int,
    device: c_int,
    rest: [u64; 9],
    access: [u64; 2],
    bytes: usize,
    at: u64,
}

const _: () = assert!(size_of::<AllocParams>() == 120);
const _: () = assert!(size_of::<KernelParams>() == 56 && size_of::<KernelParams2>() == 72);
const _: () = assert!(size_of::<MemsetParams>() == 40 && size_of::<HostParams>() == 16);

impl KernelParams {
    fn record(&self) -> Result<Vec<Op>> {
        let arguments = Arguments {
            pointers: self.pointers,
            extra: self.extra,
        };
        record(|stream| {
            launch::launch(
                self.function,
                self.grid,
                self.block,
                self.shared,
                false,
                stream,
                arguments,
            )
        })
    }
}

impl KernelParams2 {
    fn first(self) -> KernelParams {
        let function = match self.first.function {
            0 => self.kernel,
            function => function,
        };
        KernelParams {
            function,
            ..self.first
        }
    }
}

/// What is submitted to a stream meanwhile.
fn record(body: impl FnOnce(Handle) -> Result) -> Result<Vec<Op>> {
    const RELAXED: i32 = 2;
    let handle = stream::create(stream::NON_BLOCKING, 0)?;
    let recorded = graph::begin(handle, RELAXED).and_then(|()| {
        let done = body(handle);
        let graph = GRAPHS.remove(graph::end(handle)?)?;
        done.map(|()| graph.ops())
    });
    stream::destroy(handle)?;
    recorded
}

fn set(params: In<MemsetParams>) -> Result<Vec<Op>> {
    let it = params.get()?;
    let size = [it.columns, it.rows.max(1)];
    record(|stream| {
        plane::set(
            it.to,
            it.pitch,
            it.size.into(),
            it.value,
            size,
            stream,
            false,
        )
    })
}

/// Adds a node behind others of the graph.
fn add(
    node: Out<Handle>,
    graph: Handle,
    after: In<Handle>,
    count: usize,
    kind: c_int,
    ops: impl FnOnce() -> Result<Vec<Op>>,
) -> Result {
    node.check()?;
    let graph = GRAPHS.get(graph)?;
    let after = (0..count)
        .map(|i| after.get_at(i))
        .collect::<Result<Vec<_>>>()?;
    let ops = ops()?;
    let mut added = lock(&graph.added);
    if !after.iter().all(|it| has(&added, *it)) {
        return Err(CuError::INVALID_VALUE);
    }
    let handle = NODES.add(Arc::new(Arc::downgrade(&graph)));
    added.push(Added {
        handle,
        kind,
        ops,
        after,
    });
    drop(added);
    node.put(handle)
}

fn has(added: &[Added], handle: Handle) -> bool {
    added.iter().any(|it| it.handle == handle)
}

/// Adds edges to a graph, or takes them away.
fn edges(
    graph: Handle,
    from: In<Handle>,
    to: In<Handle>,
    count: usize,
    change: impl Fn(&mut Vec<Handle>, Handle),
) -> Result {
    let graph = GRAPHS.get(graph)?;
    let mut added = lock(&graph.added);
    for i in 0..count {
        let (from, to) = (from.get_at(i)?, to.get_at(i)?);
        let known = has(&added, from);
        let node = added.iter_mut().find(|it| it.handle == to);
        let node = node.filter(|_| known).ok_or(CuError::INVALID_VALUE)?;
        change(&mut node.after, from);
    }
    Ok(())
}

fn link(after: &mut Vec<Handle>, from: Handle) {
    after.push(from);
}

fn unlink(after: &mut Vec<Handle>, from: Handle) {
    after.retain(|it| *it != from);
}

/// A copy with nodes of its own.
fn clone(graph: Handle) -> Result<Handle> {
    let graph = GRAPHS.get(graph)?;
    let copy = Arc::new(Graph::new(graph.nodes.clone(), graph.lanes));
    let mut added = lock(&graph.added).clone();
    let renamed: Vec<(Handle, Handle)> = added
        .iter()
        .map(|it| {
            let new = NODES.add(Arc::new(Arc::downgrade(&copy)));
            (it.handle, new)
        })
        .collect();
    let new = |old: Handle| renamed.iter().find(|it| it.0 == old).map_or(0, |it| it.1);
    for node in &mut added {
        node.handle = new(node.handle);
        node.after.iter_mut().for_each(|it| *it = new(*it));
    }
    *lock(&copy.added) = added;
    Ok(GRAPHS.add(copy))
}

/// The graph of a node that was added.
fn graph_of(node: Handle) -> Result<Arc<Graph>> {
    let of = NODES.get(node)?;
    Weak::upgrade(&of).ok_or(CuError::INVALID_HANDLE)
}

fn kind_of(node: Handle) -> Result<c_int> {
    let graph = graph_of(node)?;
    let added = lock(&graph.added);
    let found = added.iter().find(|it| it.handle == node);
    found.map(|it| it.kind).ok_or(CuError::INVALID_HANDLE)
}

fn remove(node: Handle) -> Result {
    let graph = graph_of(node)?;
    let mut added = lock(&graph.added);
    added.retain(|it| it.handle != node);
    added.iter_mut().for_each(|it| unlink(&mut it.after, node));
    NODES.remove(node).map(drop)
}

/// Answers with as many things as there is room for, or only with how many there are.
fn list(things: &[Handle], room: Out<Handle>, count: Out<usize>) -> Result {
    if !room.is_null() {
        room.put_all(things.iter().copied().take(count.get()?))?;
    }
    count.put(things.len())
}

fn nodes(graph: Handle, roots: bool, room: Out<Handle>, count: Out<usize>) -> Result {
    let graph = GRAPHS.get(graph)?;
    let added = lock(&graph.added);
    let wanted = added.iter().filter(|it| !roots || it.after.is_empty());
    let handles: Vec<Handle> = wanted.map(|it| it.handle).collect();
    // Captured nodes have no handles.
    match (graph.captured(), room.is_null()) {
        (0, _) => list(&handles, room, count),
        (captured, true) if !roots => count.put(captured + handles.len()),
        _ => Err(CuError::NOT_SUPPORTED),
    }
}

/// Gives a kernel of an executable graph other arguments, or another shape.
fn change(executable: Handle, node: Handle, params: KernelParams) -> Result {
    let executable = EXECUTABLES.get(executable)?;
    let [op] = <[Op; 1]>::try_from(params.record()?).map_err(|_| CuError::INVALID_VALUE)?;
    let mut nodes = lock(&executable.nodes);
    let found = nodes.iter_mut().find(|it| it.origin == node);
    found.ok_or(CuError::INVALID_VALUE)?.op = op;
    Ok(())
}

exports! { FUNCTIONS by cuda;
    cuGraphCreate(graph: Out<Handle>, flags: c_uint) => {
        graph.check()?;
        if flags != 0 {
            return Err(CuError::INVALID_VALUE);
        }
        process()?;
        graph.put(GRAPHS.add(Arc::new(Graph::new(Vec::new(), 1))))
    };
    cuGraphClone(copy: Out<Handle>, graph: Handle) => { copy.check()?; copy.put(clone(graph)?) };
    cuGraphAddKernelNode(node: Out<Handle>, graph: Handle, after: In<Handle>, count: usize, params: In<KernelParams>) => add(node, graph, after, count, KERNEL, || params.get()?.record());
    cuGraphAddKernelNode_v2(node: Out<Handle>, graph: Handle, after: In<Handle>, count: usize, params: In<KernelParams2>) => add(node, graph, after, count, KERNEL, || params.get()?.first().record());
    cuGraphAddMemcpyNode(node: Out<Handle>, graph: Handle, after: In<Handle>, count: usize, params: plane::Volume, _context: Handle) => add(node, graph, after, count, MEMCPY, || record(|stream| plane::copy_volume(params, stream, false)));
    cuGraphAddMemsetNode(node: Out<Handle>, graph: Handle, after: In<Handle>, count: usize, params: In<MemsetParams>, _context: Handle) => add(node, graph, after, count, MEMSET, || set(params));
    cuGraphAddHostNode(node: Out<Handle>, graph: Handle, after: In<Handle>, count: usize, params: In<HostParams>) => add(node, graph, after, count, HOST, || {
        let it = params.get()?;
        record(|stream| stream::launch_host(stream, it.function, it.data))
    });
    cuGraphAddMemAllocNode(node: Out<Handle>, graph: Handle, after: In<Handle>, count: usize, params: Out<AllocParams>) => {
        let it = params.get()?;
        // Memory of a device.
        if it.kind != 1 || it.location != 1 {
            return Err(CuError::NOT_SUPPORTED);
        }
        let at = memory::reserve_for_graph(process()?.device(it.device)?.index, it.bytes as u64)?;
        add(node, graph, after, count, ALLOCATE, || Ok(vec![Op::following(Work::Record, Effect::Allocate(at))]))?;
        params.put(AllocParams { at, ..it })
    };
    cuGraphAddMemFreeNode(node: Out<Handle>, graph: Handle, after: In<Handle>, count: usize, address: u64) => {
        if !memory::space().is_graphs(address, 1) {
            return Err(CuError::INVALID_VALUE);
        }
        add(node, graph, after, count, FREE, || Ok(vec![Op::following(Work::Record, Effect::Free(address))]))
    };
    cuGraphAddEmptyNode(node: Out<Handle>, graph: Handle, after: In<Handle>, count: usize) => add(node, graph, after, count, EMPTY, || Ok(Vec::new()));
    cuGraphAddChildGraphNode(node: Out<Handle>, graph: Handle, after: In<Handle>, count: usize, child: Handle) => add(node, graph, after, count, GRAPH, || {
        let child = GRAPHS.get(child)?;
        let added = in_order(&lock(&child.added))?;
        Ok(child.ops().into_iter().chain(added.into_iter().map(|it| it.1)).collect())
    });
    cuGraphAddDependencies(graph: Handle, from: In<Handle>, to: In<Handle>, count: usize) => edges(graph, from, to, count, link);
    cuGraphAddDependencies_v2(graph: Handle, from: In<Handle>, to: In<Handle>, _data: UserData, count: usize) => edges(graph, from, to, count, link);
    cuGraphRemoveDependencies(graph: Handle, from: In<Handle>, to: In<Handle>, count: usize) => edges(graph, from, to, count, unlink);
    cuGraphRemoveDependencies_v2(graph: Handle, from: In<Handle>, to: In<Handle>, _data: UserData, count: usize) => edges(graph, from, to, count, unlink);
    cuGraphDestroyNode(node: Handle) => remove(node);
    cuGraphNodeGetType(node: Handle, kind: Out<c_int>) => kind.put(kind_of(node)?);
    cuGraphGetNodes(graph: Handle, room: Out<Handle>, count: Out<usize>) => nodes(graph, false, room, count);
    cuGraphGetRootNodes(graph: Handle, room: Out<Handle>, count: Out<usize>) => nodes(graph, true, room, count);
    cuGraphExecKernelNodeSetParams(executable: Handle, node: Handle, params: In<KernelParams>) => change(executable, node, params.get()?);
    cuGraphExecKernelNodeSetParams_v2(executable: Handle, node: Handle, params: In<KernelParams2>) => change(executable, node, params.get()?.first());
    cuGraphExecUpdate_v2(executable: Handle, graph: Handle, result: Out<[u64; 3]>) => {
        let updated = graph::update(executable, graph);
        // `CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED`, and which nodes differ.
        result.put_if_wanted([u64::from(updated.is_err()) * 2, 0, 0]);
        updated
    };
    [cuGraphInstantiateWithParams_ptsz] cuGraphInstantiateWithParams(executable: Out<Handle>, graph: Handle, params: Out<[u64; 4]>) => {
        executable.check()?;
        // Flags and a stream for the upload stay; no node is to blame.
        let [flags, stream, ..] = params.get()?;
        params.put([flags, stream, 0, 0])?;
        executable.put(graph::instantiate(graph)?)
    };
}
