<#
.SYNOPSIS
Installs or upgrades echo-node on Windows for the current user.

.DESCRIPTION
Creates an environment in %LOCALAPPDATA%\echo-swarm and puts the command echo-node on the user's PATH. Needs no
administrator rights. uninstall.ps1 removes everything.

-From installs the output of `make wheelhouse`: nothing is compiled or downloaded from elsewhere. From source, the extra
`cpu` (llama.cpp) is compiled here and needs Visual Studio's C++ build tools. Without them, `cuda` (PyTorch) is used; it
also runs on the CPU, more slowly. The PyTorch that pip finds by itself on Windows is the CPU build; for an
NVIDIA GPU, put PyTorch's own CUDA build into the environment afterwards.

A new version replaces the old one after it has proven that it starts.

.EXAMPLE
powershell -ExecutionPolicy Bypass -File installers\windows\install.ps1 -Join https://hub.example.org
#>
[CmdletBinding()]
param(
    # A wheelhouse: a directory, an archive or a URL (https; it may end in #sha256=HEX).
    [string] $From = '',
    # Install a checkout or a wheel instead; default: the checkout of this script.
    [string] $Source = '',
    # cpu, cuda or none; default: by this machine's hardware.
    [ValidateSet('', 'cpu', 'cuda', 'none')] [string] $Extra = '',
    # The interpreter to use, 3.11 or newer.
    [string] $Python = '',
    # Join this hub afterwards.
    [string] $Join = '',
    # The invitation, if the hub asks for one.
    [string] $Token = '',
    # Allow http:// to another machine, in a network that you trust.
    [switch] $Insecure,
    # With -Join: run in the background whenever you are logged in.
    [switch] $Service,
    # from_hub.ps1's folder; deleted after the installation.
    [string] $Temporary = ''
)

Set-StrictMode -Version 3.0
$ErrorActionPreference = 'Stop'
. (Join-Path $PSScriptRoot 'settings.ps1')

# Runs a program and stops when it fails; PowerShell itself ignores exit codes.
function Invoke-Program([string] $File, [string[]] $Arguments) {
    & $File @Arguments
    if ($LASTEXITCODE -ne 0) { throw "$File $Arguments ended with exit code $LASTEXITCODE." }
}

function Test-Python([string] $File, [string[]] $Arguments) {
    if (-not (Get-Command $File -ErrorAction SilentlyContinue)) { return $false }
    # The Store's stand-in for python.exe writes to stderr, which must not stop this script.
    $ErrorActionPreference = 'Continue'
    & $File @Arguments -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>$null | Out-Null
    return $LASTEXITCODE -eq 0
}

function Find-Python {
    $candidates = @()
    if ($Python) { $candidates += , @($Python) }
    else {
        # 3.14 last: libtorrent has no wheel for it, and artefacts then come over HTTP alone.
        foreach ($version in '3.13', '3.12', '3.11', '3.14') { $candidates += , @('py', "-$version") }
        $candidates += , @('python')
    }
    foreach ($candidate in $candidates) {
        $arguments = @($candidate | Select-Object -Skip 1)
        if (Test-Python $candidate[0] $arguments) { return , $candidate }
    }
    throw 'Python 3.11 or newer is needed. For example: winget install Python.Python.3.13'
}

function Test-Connected {
    $ErrorActionPreference = 'Continue' # Without a running node, `status` writes to stderr.
    return (& $EchoNode status --json 2>$null | Out-String) -match '"connected": true'
}

# Returns the status of a running node; nothing if none runs.
function Get-Status {
    $ErrorActionPreference = 'Continue'
    $said = & $EchoNode status --json 2>$null | Out-String
    if ($LASTEXITCODE -eq 0) { return $said | ConvertFrom-Json }
}

# Leaves a running node at its present hub, and explains to its owner how to move it to the hub of -Join.
function Show-Running([string] $Hub) {
    Write-Host "A node is already running on this machine. It still works for $Hub. To see its state: echo-node status"
    if ("$Join/".StartsWith("$Hub/", [StringComparison]::OrdinalIgnoreCase)) {
        if ($Service) { Write-Host 'To run it as a service: echo-node finish; when it has stopped: echo-node service install' }
        return
    }
    $arguments = @($joinArguments | ForEach-Object { if ($_ -match '\s') { "'$_'" } else { $_ } }) -join ' '
    Write-Host "The node has not joined $Join. To change that, first let it finish its work and stop: echo-node finish"
    Write-Host "  then, to work for $Join only: echo-node $arguments"
    Write-Host "  or, to work for both hubs in turns: echo-node $arguments --share 1"
    Write-Host 'Once the node is connected, press Ctrl-C, and run it in the background: echo-node service install'
}

function Select-Extra {
    if ($Extra -eq 'none') { return '' }
    if ($Extra) { return $Extra }
    $vswhere = Join-Path ${env:ProgramFiles(x86)} 'Microsoft Visual Studio\Installer\vswhere.exe'
    if (Test-Path -LiteralPath $vswhere) {
        $tools = & $vswhere -latest -products * -requires Microsoft.VisualStudio.Component.VC.Tools.x86.x64 -property installationPath
        if ($tools) { return 'cpu' }
    }
    Write-Host 'This machine has no C++ build tools, so PyTorch is installed instead of llama.cpp.'
    return 'cuda'
}

# Recompiles llama.cpp if it lacks RPC: pip may have taken such a build from its cache. llama_with_rpc.sh does the same
# on Linux and macOS.
function Restore-Rpc([string] $File) {
    if ($env:CMAKE_ARGS -match 'GGML_RPC=OFF') { return }
    $ErrorActionPreference = 'Continue'
    $found = & $File -c 'import llama_cpp; print(llama_cpp.llama_supports_rpc(), llama_cpp.__version__)' 2>$null
    if ($LASTEXITCODE -ne 0 -or $found -notmatch '^False (.+)$') { return }
    $version = $Matches[1]
    Write-Host "llama-cpp-python $version came from pip's cache. It lacks RPC, which several machines need to share a model."
    Write-Host 'Compiling it again, with RPC.'
    & $File -m pip cache remove "llama_cpp_python-$version*" 2>$null | Out-Null
    $ErrorActionPreference = 'Stop'
    Invoke-Program $File @('-m', 'pip', 'install', '--disable-pip-version-check', '--force-reinstall', '--no-deps',
        '--no-binary', 'llama-cpp-python', "llama-cpp-python==$version")
}

# Returns wheelhouse.py's output; an error stops this script.
function Invoke-Wheelhouse([string[]] $Arguments) {
    $found = Find-Python
    $answer = & $found[0] @($found | Select-Object -Skip 1) (Join-Path $PSScriptRoot '..\wheelhouse.py') @Arguments
    if ($LASTEXITCODE -ne 0) { throw 'The wheelhouse is not installed; see above.' }
    return $answer
}

# The wheelhouse's own pip installs its wheels by hash, without index, network or compiler.
function Install-Wheelhouse([string] $Into) {
    $scratch = Join-Path ([IO.Path]::GetTempPath()) ([IO.Path]::GetRandomFileName())
    New-Item -ItemType Directory -Path $scratch | Out-Null
    try {
        $arguments = @('open', $From, $scratch)
        if ($Insecure) { $arguments += '--insecure' }
        $opened = Invoke-Wheelhouse $arguments
        $requirements = Invoke-Wheelhouse @('requirements', $opened)
        $found = Find-Python
        Write-Host "Installing from $From with $found"
        Invoke-Program $found[0] (@($found | Select-Object -Skip 1) + @('-m', 'venv', '--without-pip', $Into))
        $wheels = Join-Path $opened 'wheels'
        $pip = Join-Path (Get-ChildItem -Path $wheels -Filter 'pip-*.whl' | Select-Object -First 1).FullName 'pip'
        Invoke-Program (Join-Path $Into 'Scripts\python.exe') @($pip, '--isolated', 'install', '--quiet',
            '--disable-pip-version-check', '--no-index', '--no-cache-dir', '--find-links', $wheels,
            '--only-binary', ':all:', '--require-hashes', '-r', $requirements)
        Copy-Item -Recurse -LiteralPath (Join-Path $opened 'installers') -Destination (Join-Path $Into 'installers')
    }
    finally { Remove-Item -LiteralPath $scratch -Recurse -Force }
}

function Install-Source([string] $Into) {
    $found = Find-Python
    Write-Host "Creating an environment with $found in $Into"
    Invoke-Program $found[0] (@($found | Select-Object -Skip 1) + @('-m', 'venv', $Into))
    $interpreter = Join-Path $Into 'Scripts\python.exe'
    $chosen = Select-Extra
    $package = if ($chosen) { "${Source}[$chosen]" } else { $Source }
    # Compiled wheels are cached next to the environment for the next upgrade, so that pip's own cache stays clean.
    if (-not $env:PIP_CACHE_DIR) { $env:PIP_CACHE_DIR = Join-Path $HomeDir 'pip-cache' }
    $options = @('-m', 'pip', 'install', '--disable-pip-version-check')
    $constraints = Join-Path $Source 'constraints.txt'
    if (Test-Path -LiteralPath $constraints) { $options += @('-c', $constraints) }
    # llama.cpp needs RPC to span several machines.
    $env:CMAKE_ARGS = "-DGGML_RPC=ON $env:CMAKE_ARGS".Trim()
    Write-Host "Installing $package; this can take minutes"
    Invoke-Program $interpreter ($options + @($package))
    Restore-Rpc $interpreter
    Copy-Item -Recurse -LiteralPath (Split-Path $PSScriptRoot) -Destination (Join-Path $Into 'installers')
}

# Throws unless the version works: the command starts, and the engine's library loads on this processor.
function Assert-Start([string] $Version) {
    Invoke-Program (Join-Path $Version 'Scripts\echo-node.exe') @('--help') | Out-Null
    $check = "import importlib.util, echo_node.main`nif importlib.util.find_spec('llama_cpp'):`n" +
        "    import llama_cpp`n    from echo_shared.gguf.llama_cpp_devices import load_devices`n" +
        "    load_devices()`n    llama_cpp.llama_backend_init()"
    Invoke-Program (Join-Path $Version 'Scripts\python.exe') @('-I', '-c', $check)
}

function Set-Current([string] $Version) {
    if (Test-Path -LiteralPath $Environment) { [IO.Directory]::Delete($Environment) } # not its target
    New-Item -ItemType Junction -Path $Environment -Target $Version | Out-Null
}

if (($Token -or $Service) -and -not $Join) { throw '-Token and -Service need -Join URL.' }
if ($From -and ($Source -or $Extra)) { throw '-From WHEELHOUSE cannot be combined with -Source or -Extra.' }
if (-not $From -and -not $Source) {
    $here = (Resolve-Path -LiteralPath (Join-Path $PSScriptRoot '..\..')).ProviderPath
    if (Test-Path -LiteralPath (Join-Path $here 'manifest.json')) { $From = $here }
    elseif (Test-Path -LiteralPath (Join-Path $here 'pyproject.toml')) { $Source = $here }
    else { throw 'There is nothing to install: give -From WHEELHOUSE, or -Source DIR or WHEEL.' }
}
if ($Source) {
    # A package name is refused, because Echo's name on an index may belong to anyone.
    if (-not (Test-Path -LiteralPath $Source)) { throw "$Source does not exist (-Source)." }
    $Source = (Resolve-Path -LiteralPath $Source).ProviderPath # Absolute, or pip would take it for a package name.
}

New-Item -ItemType Directory -Force -Path $Versions, $BinDir | Out-Null
$before = if (Test-Path -LiteralPath $Environment) { @((Get-Item -LiteralPath $Environment).Target)[0] } else { '' }
$new = Join-Path $Versions (Get-Date -Format 'yyyyMMdd.HHmmss')
try {
    if ($From) { Install-Wheelhouse $new } else { Install-Source $new }
    Assert-Start $new
}
catch {
    if (Test-Path -LiteralPath $new) { Remove-Item -LiteralPath $new -Recurse -Force }
    if (-not $before) { Remove-Item -LiteralPath $HomeDir -Recurse -Force }
    throw
}
Set-Current $new
if (Test-Path -LiteralPath (Join-Path $env:LOCALAPPDATA 'echo-node\logon-task.xml')) {
    Write-Host 'Restarting the service'
    try {
        Invoke-Program $EchoNode @('service', 'install')
        for ($waited = 0; $waited -lt 60 -and -not (Get-Status); $waited++) { Start-Sleep -Seconds 1 }
    }
    catch {
        if ($before) {
            Set-Current $before
            & $EchoNode service install
            Remove-Item -LiteralPath $new -Recurse -Force
            throw 'The new version does not start as a service. The previous version was restored.'
        }
        throw
    }
}
# A running node holds its files open; files that cannot be removed now are removed by the next upgrade.
Get-ChildItem -LiteralPath $Versions | Where-Object FullName -ne $new |
    Remove-Item -Recurse -Force -ErrorAction SilentlyContinue

$shim = Join-Path $BinDir 'echo-node.cmd'
Set-Content -LiteralPath $shim -Encoding Ascii -Value '@"%~dp0..\current\Scripts\echo-node.exe" %*'
$entries = @(Get-UserPath)
if ($entries -notcontains $BinDir) {
    Set-UserPath ($entries + $BinDir)
    $env:Path = "$env:Path;$BinDir"
    Write-Host "$BinDir was added to your PATH. Open a new terminal to use it."
}
Write-Host "Installed: command echo-node, in $HomeDir"
Write-Host "To remove it: $Environment\installers\windows\uninstall.ps1"
if ($Temporary -and (Test-Path -LiteralPath $Temporary)) { Remove-Item -LiteralPath $Temporary -Recurse -Force }

if (-not $Join) {
    Write-Host 'Next: echo-node join URL'
    return
}
$joinArguments = @('join', $Join)
if ($Token) { $joinArguments += @('--token', $Token) }
if ($Insecure) { $joinArguments += '--insecure' }
$running = Get-Status
if ($running) {
    Show-Running $running.hub
    return
}
if (-not $Service) {
    Write-Host "Joining $Join. Ctrl-C stops the node; echo-node run starts it again."
    Invoke-Program $EchoNode $joinArguments
    return
}
# The service uses the hub that was joined last, so the node joins once before the service is installed.
$joining = Start-Process -FilePath $EchoNode -ArgumentList ($joinArguments + '--quiet') -NoNewWindow -PassThru
try {
    while (-not $joining.HasExited) {
        if (Test-Connected) { break }
        Start-Sleep -Seconds 1
    }
    if ($joining.HasExited -and $joining.ExitCode -ne 0) { throw "echo-node join ended with exit code $($joining.ExitCode)." }
}
finally {
    # The node's results are spooled on disk, so ending it at once loses nothing.
    if (-not $joining.HasExited) { Stop-Process -Id $joining.Id }
}
Invoke-Program $EchoNode @('service', 'install')
